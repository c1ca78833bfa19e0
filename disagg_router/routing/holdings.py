"""What the prefix index is made of: blocks of prefixes, and what each target holds of them."""

from __future__ import annotations

from disagg_router.model import Target

EngineHash = int | bytes

GPU, HOST = "GPU", "CPU"  # as vLLM names them in events; any other medium is no tier of one target
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


class Block:
    """One block of one prefix. `gpu` and `host` have the bit of every target that holds it there.

    A block stays while it has a holder or children, so the blocks that exist form whole prefixes.
    """

    __slots__ = ("children", "gpu", "host", "key", "name", "parent", "used")

    def __init__(self, key: int, parent: Block | None, name: EngineHash) -> None:
        self.key, self.parent, self.name = key, parent, name
        self.children = 0
        self.gpu = self.host = 0
        self.used = False  # looked up since it last was a leaf


class Holder:
    """What one target holds.

    vLLM keeps several copies of a block when equal prompts are computed at once, or when a repeated prompt ends
    with a full block, and announces every copy's coming and going: so copies are counted. It frees leaves first,
    so GPU holdings are whole prefixes; `orphans` counts the blocks for which that does not hold, and while it is
    not 0 lookups check this target block by block instead of trusting it.
    """

    __slots__ = (
        "bit",
        "block_size",
        "blocks",
        "copies",
        "groups",
        "host_blocks",
        "kids",
        "orphans",
        "renamed",
        "target",
    )

    def __init__(self, target: Target, bit: int) -> None:
        self.target, self.bit = target, bit
        self.block_size: int | None = None
        self.groups: dict[int, bool] = {}  # index -> makes prefixes
        self.clear()

    def clear(self) -> None:
        self.blocks: dict[EngineHash, Block] = {}
        self.renamed: dict[Block, EngineHash] = {}  # where this engine's hash is not block.name
        self.copies: dict[Block, int] = {}  # GPU copies beyond the first
        self.kids: dict[Block, int] = {}  # children in GPU memory
        self.orphans = 0
        self.host_blocks = 0

    def makes_prefixes(self, group: int | None, kind: str | None) -> bool:
        """Of several full-attention groups only the first counts: they hold and lose the same blocks."""
        if group is None:
            return kind in _PREFIX_KINDS
        if kind is not None:
            self.groups[group] = kind in _PREFIX_KINDS
        return group == min((index for index, whole in self.groups.items() if whole), default=None)

    def may_call(self, block: Block | None, name: EngineHash) -> bool:
        """False where this hash already names other content, or this content already has another hash."""
        if known := self.blocks.get(name):
            return known is block
        return block is None or not (block.gpu | block.host) & self.bit

    def gain_gpu(self, block: Block) -> None:
        if block.gpu & self.bit:
            self.copies[block] = self.copies.get(block, 0) + 1
            return
        block.gpu |= self.bit
        self.orphans -= self.kids.get(block, 0)
        if parent := block.parent:
            self.kids[parent] = self.kids.get(parent, 0) + 1
            self.orphans += not parent.gpu & self.bit

    def lose_gpu(self, block: Block) -> None:
        """All copies."""
        if not block.gpu & self.bit:
            return
        block.gpu &= ~self.bit
        self.copies.pop(block, None)
        self.orphans += self.kids.get(block, 0)
        if parent := block.parent:
            self.orphans -= not parent.gpu & self.bit
            if left := self.kids[parent] - 1:
                self.kids[parent] = left
            else:
                del self.kids[parent]

    def gain_host(self, block: Block) -> None:
        self.host_blocks += not block.host & self.bit
        block.host |= self.bit

    def lose_host(self, block: Block) -> None:
        self.host_blocks -= bool(block.host & self.bit)
        block.host &= ~self.bit
