"""Garbage collections of a running server: they leave out what was loaded before."""

import atexit
import gc


def freeze_loaded() -> None:
    """Collect garbage, and exclude the objects that are left from later collections of this process.

    Python's full collections visit every object. After torch, Triton and a model have been loaded, one takes 0.2 s,
    in which a server answers nobody.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report what is never collected as leaks
