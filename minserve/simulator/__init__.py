"""The engine's own scheduler under simulated time: a fleet without machines, a day in seconds.

    costs     what a step costs, learned from a step log
    engine    one engine: the same Scheduler and PagePool, and a clock of its own
    fleet     several, behind a router's policy and under an autoscaler

Story    notebooks/14_the_fleet.ipynb
"""
