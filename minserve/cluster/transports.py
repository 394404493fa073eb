"""The transports by name, as the command line has them: one half of a server says which half, how, and where."""

import math

from minserve.cluster.connector import MODES, ROLES, KVConnector
from minserve.cluster.file_connector import FileConnector
from minserve.cluster.gloo_connector import GlooConnector
from minserve.cluster.link import Link

TRANSPORTS = {"file": FileConnector, "gloo": GlooConnector}


def add_connector_arguments(parser, roles: bool = True) -> None:
    """The options of one half; without `roles`, those that are the same for both."""
    if roles:
        parser.add_argument("--kv-role", choices=ROLES[:2], help="computes prompts | continues them")
        parser.add_argument(
            "--kv-path", help="where both meet: a folder; for gloo a new file, or tcp://HOST:PORT"
        )
    parser.add_argument(
        "--kv-connector",
        choices=list(TRANSPORTS),
        default="file",
        help="how keys and values travel; default: file",
    )
    parser.add_argument(
        "--kv-mode",
        choices=MODES,
        default="whole",
        help="at once, or layer by layer while the next one computes",
    )
    parser.add_argument(
        "--kv-bandwidth", type=float, default=math.inf, help="bytes/s of the link; default: no limit"
    )
    parser.add_argument("--kv-latency", type=float, default=0.0, help="seconds for each message; default: 0")
    parser.add_argument(
        "--kv-lease", type=float, default=30.0, help="seconds without news until nobody waits; default: 30"
    )


def connector_of(args) -> KVConnector | None:
    """What the arguments describe; None without a role. Raises ValueError for a role without a place to meet."""
    if args.kv_role is None:
        return None
    if not args.kv_path:
        raise ValueError(
            f"--kv-role {args.kv_role} needs --kv-path: the other half has to find this one there"
        )
    link = Link(args.kv_bandwidth, args.kv_latency)
    kind = TRANSPORTS[args.kv_connector]
    return kind(args.kv_path, mode=args.kv_mode, link=link, lease=args.kv_lease, role=args.kv_role)
