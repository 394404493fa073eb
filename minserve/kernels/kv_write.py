"""Write this step's keys and values into their cache slots."""


# ---------------------------------------------------------------- the definition
def kv_write_reference(k, v, k_cache, v_cache, slots) -> None:
    live = slots >= 0                                                                          # [T]
    where = slots[live]
    k_cache.index_copy_(0, where, k[live])
    v_cache.index_copy_(0, where, v[live])


# ---------------------------------------------------------------- the launcher
def kv_write(k, v, k_cache, v_cache, slots) -> None:
    kv_write_reference(k, v, k_cache, v_cache, slots)
