"""How many bytes of tensors are alive: exact, unlike resident memory, and blind to what a kernel needs inside."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts storages that operations make while this is entered; those from before are not counted."""

    def __init__(self):
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self._known:
                self._known.add(storage)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _free(self, num_bytes):
        self.live_bytes -= num_bytes


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
