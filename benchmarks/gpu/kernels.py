"""The limits of the device, and how close attention comes to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.setting import Notes, Setting
from benchmarks.gpu.varlen import VarlenAttention, find_varlen
from triptych.protocol.config import GPU_PAGE_SIZE
from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache
from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.kernels.triton_chunk import ChunkTile, KeySplits, chunk_attention
from triptych.workers.execute.kernels.triton_decode import DecodeTile, decode_attention, decode_tile
from triptych.workers.execute.model.pool import LayerShape, allocate_pool

Way = Callable[[], object]

DECODE_TILES = [
    DecodeTile(),
    DecodeTile(num_stages=3),
    DecodeTile(num_keys=32, num_stages=3),
    DecodeTile(num_keys=128, num_warps=8),
]
CHUNK_TILES = [
    ChunkTile(),
    ChunkTile(num_stages=2),
    ChunkTile(num_stages=2, max_registers=168),
    ChunkTile(num_rows=128, num_warps=8),
    ChunkTile(num_rows=128, num_keys=32, num_warps=8, max_registers=128),
    ChunkTile(num_keys=32),
]


def limits(setting: Setting, note: Notes) -> None:
    """Bytes per second of a large copy, counting reads and writes, and operations per second of a large bfloat16
    product.
    """
    size = setting.size(2 << 30, 1 << 16)
    source = torch.randint(0, 100, (size // 4,), dtype=torch.int32, device=setting.device)
    target = torch.empty_like(source)
    note("copy_bytes_per_s", 2 * size / setting.seconds(lambda: target.copy_(source)))
    side = setting.size(8192, 64)
    # Random values: with zeros the same product is an eighth faster.
    a, b = (torch.randn(side, side, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    note("matmul_flop_per_s", 2 * side**3 / setting.seconds(lambda: a @ b))
    if not setting.is_dry:
        note("device", torch.cuda.get_device_name())
        note("memory_bytes", torch.cuda.get_device_properties(0).total_memory)


def attention(setting: Setting, note: Notes) -> None:
    """Decodes of 64 sequences with 2048 keys compared with the copy, chunks of 2048 and 1024 tokens with the product;
    and the same over keys and values in eight bits.

    Results shown in the table come first, because each variant is a kernel that has to be compiled.
    """
    rates = setting.found("limits")

    def measure(name: str, scene: _Scene, ways: dict[str, Way], limit: str) -> None:
        found = _Variants(scene.amount, rates.get(limit), lambda summary: note(name, summary))
        for way, function in ways.items():
            found.measure(way, partial(setting.seconds, function))

    for page_size in (GPU_PAGE_SIZE, 16, 256):
        decodes = Decodes(setting, page_size)
        measure(f"decode_page_{page_size}", decodes, decodes.ways(setting), "copy_bytes_per_s")
        if page_size == 16:
            small = Chunk(setting, 0, page_size=page_size)
            measure("chunk_page_16", small, {"default": small.default(setting)}, "matmul_flop_per_s")
        if page_size != GPU_PAGE_SIZE:
            continue
        for name, before in (("fresh", 0), ("later", setting.size(6144, 20))):
            chunk = Chunk(setting, before)
            measure(f"chunk_{name}", chunk, chunk.ways(setting), "matmul_flop_per_s")
        half = Chunk(setting, 0, setting.size(1024, 12))
        measure("chunk_1024", half, half.ways(setting), "matmul_flop_per_s")
        short = ShortChunk(setting)
        measure("chunk_short", short, short.ways(setting), "copy_bytes_per_s")
        eight = Decodes(setting, page_size, has_eight_bits=True)
        measure("decode_int8", eight, eight.ways(setting), "copy_bytes_per_s")
        note("decode_tokens_per_s", decodes.tokens_per_s(setting))
        note("decode_int8_tokens_per_s", eight.tokens_per_s(setting))
        eight_chunk = Chunk(setting, 0, has_eight_bits=True)
        measure("chunk_int8", eight_chunk, eight_chunk.ways(setting), "matmul_flop_per_s")
        eight_short = ShortChunk(setting, has_eight_bits=True)
        measure("chunk_short_int8", eight_short, {"default": eight_short.default(setting)}, "copy_bytes_per_s")


class _Variants:
    """Rates of several variants of the same computation. Results are recorded after each of them."""

    def __init__(self, amount: float, limit: float | None, tell: Callable[[dict[str, Any]], None]) -> None:
        self._amount, self._limit, self._tell = amount, limit, tell  # amount of work, and the possible rate per second
        self._rates: dict[str, float] = {}
        self._errors: dict[str, str] = {}

    def measure(self, name: str, seconds: Callable[[], float]) -> None:
        try:
            self._rates[name] = self._amount / seconds()
        except Exception as error:  # a tile may exceed a multiprocessor's resources: the others are still measured
            self._errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
        self._tell(self._summary())

    def _summary(self) -> dict[str, Any]:
        """The share of the limit that the default variant and the best one reach."""
        best = max(self._rates, key=lambda name: self._rates[name], default=None)
        shares = {name: round(rate / self._limit, 4) for name, rate in self._rates.items()} if self._limit else {}
        return {
            "default": shares.get("default"),
            "best": best,
            "best_share": shares.get(best or ""),
            "shares": shares,
            "errors": self._errors,
        }


class _Scene:
    """Pages of one layer in random order, and queries of the shape of Qwen3-8B."""

    amount: float  # bytes that must be read, or operations

    def __init__(
        self, setting: Setting, *, num_seqs: int, context: int, num_tokens: int, page_size: int, has_eight_bits: bool
    ) -> None:
        shape, device = setting.shape("qwen3-8b"), setting.device
        self._num_layers = shape["num_hidden_layers"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = shape["head_dim"]
        width = -(-context // page_size)
        dtype = torch.float16 if setting.is_dry else torch.bfloat16  # the interpreter has no bfloat16 products

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=torch.float32).to(dtype)

        pages = num_seqs * width + 1
        self.cache = LayerCache(random(pages, page_size, kv_heads, dim), random(pages, page_size, kv_heads, dim))
        if has_eight_bits:
            self.cache = allocate_pool(
                {0: LayerShape(kv_heads, dim, dim, torch.int8)}, pages - 1, page_size=page_size, device=device
            )[0]
            for pool in self.cache.pools:
                pool.copy_(torch.rand(pool.shape, device=device) * (127 if pool.dtype == torch.int8 else 0.01))
        self.bytes_per_token = sum(pool[0].nbytes for pool in self.cache.pools) // page_size
        self.query = random(num_tokens, heads, dim)
        self.scale = dim**-0.5
        order = 1 + torch.randperm(pages - 1, device=device, dtype=torch.int64)
        self.tables = order.view(num_seqs, width).to(torch.int32)
        self.contexts = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
        starts = torch.linspace(0, num_tokens, num_seqs + 1, device=device)
        self.starts = starts.round().to(torch.int32)

    def form(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": None, "softcap": None, "sinks": None}

    def varlen(self, setting: Setting, max_query_len: int) -> dict[str, Way]:
        """torch's own paged attention, if available."""
        varlen = None if setting.is_dry else find_varlen()
        return {} if varlen is None else {"varlen": self.attend(VarlenAttention(setting.device, varlen), max_query_len)}

    def attend(self, kernel: TritonAttention, max_query_len: int) -> Way:
        """Attention with the choices that ``kernel`` makes."""
        ints = torch.zeros(len(self.query), dtype=torch.int32, device=self.query.device)
        step = DeviceStep(
            ints, ints, ints, ints, self.starts, self.contexts, ints, self.tables,
            num_decodes=len(self.contexts) if max_query_len == 1 else 0, max_query_len=max_query_len,
        )  # fmt: skip
        kernel.use(step)
        return lambda: kernel.attend(self.cache, self.query, AttentionForm(self.scale))


class Decodes(_Scene):
    def __init__(self, setting: Setting, page_size: int, *, has_eight_bits: bool = False) -> None:
        self.page_size = page_size
        num_seqs, context = setting.size(64, 2), setting.size(2048, 40)
        super().__init__(
            setting, num_seqs=num_seqs, context=context, num_tokens=num_seqs, page_size=page_size,
            has_eight_bits=has_eight_bits,
        )  # fmt: skip
        self.amount = num_seqs * context * self.bytes_per_token

    def tokens_per_s(self, setting: Setting) -> float:
        """How many tokens a second attention alone allows, in all layers."""
        seconds = setting.seconds(self.attend(TritonAttention(setting.device), 1))
        return len(self.query) / (int(self._num_layers) * seconds)

    def ways(self, setting: Setting) -> dict[str, Way]:
        kernel = TritonAttention(setting.device)
        default = kernel._num_splits(len(self.query) * self.cache.keys.shape[2], int(self.contexts[0]))
        tile = decode_tile(self.query.shape[2], self.query.dtype, has_eight_bits=self.cache.scales is not None)
        cuts = {"default": (default, tile)}
        if self.page_size == GPU_PAGE_SIZE:  # of others, each tile is one more kernel to compile, for seconds
            splits = sorted({1, default, 2 * default, 4 * default})
            cuts |= {f"splits {default}, {tuple(tile)}": (default, tile) for tile in DECODE_TILES}
            cuts |= {f"splits {n}, {tuple(tile)}": (n, tile) for n in splits for tile in DECODE_TILES}
        ways: dict[str, Way] = {name: partial(self._run, *cut) for name, cut in cuts.items()}
        if setting.is_dry:
            return dict(list(ways.items())[:2])
        return ways | self.varlen(setting, 1)

    def _run(self, num_splits: int, tile: DecodeTile) -> None:
        decode_attention(
            self.query, self.cache.keys, self.cache.values, scales=self.cache.scales, block_tables=self.tables,
            context_lens=self.contexts, num_splits=num_splits, tile=tile, **self.form(),
        )  # fmt: skip


class Chunk(_Scene):
    def __init__(
        self,
        setting: Setting,
        before: int,
        length: int | None = None,
        *,
        page_size: int = GPU_PAGE_SIZE,
        has_eight_bits: bool = False,
    ) -> None:
        self.length = length or setting.size(2048, 20)
        context = before + self.length
        super().__init__(
            setting, num_seqs=1, context=context, num_tokens=self.length, page_size=page_size,
            has_eight_bits=has_eight_bits,
        )  # fmt: skip
        num_pairs = self.length * before + self.length * (self.length + 1) // 2
        self.amount = 4 * self.query[0].numel() * num_pairs

    def ways(self, setting: Setting) -> dict[str, Way]:
        ways: dict[str, Way] = {"default": self.default(setting)}
        ways |= {str(tuple(tile)): partial(self._run, tile) for tile in CHUNK_TILES}
        if setting.is_dry:
            return dict(list(ways.items())[:2])
        return ways | self.varlen(setting, self.length)

    def default(self, setting: Setting) -> Way:
        return self.attend(TritonAttention(setting.device), self.length)

    def _run(self, tile: ChunkTile | None, splits: KeySplits | None = None) -> None:
        chunk_attention(
            self.query, self.cache.keys, self.cache.values, torch.empty_like(self.query), scales=self.cache.scales,
            block_tables=self.tables, context_lens=self.contexts, query_starts=self.starts, tile=tile, splits=splits,
            **self.form(),
        )  # fmt: skip


class ShortChunk(Chunk):
    """A few tokens after a long prefix, whose keys and values have to be read."""

    def __init__(self, setting: Setting, *, has_eight_bits: bool = False) -> None:
        super().__init__(setting, setting.size(30_000, 100), setting.size(16, 3), has_eight_bits=has_eight_bits)
        self.amount = int(self.contexts[0]) * self.bytes_per_token

    def ways(self, setting: Setting) -> dict[str, Way]:
        splits = [KeySplits(num_keys, is_parallel=True) for num_keys in (512, 1024, 2048, 4096)]
        ways = {"default": self.default(setting)}
        ways |= {f"splits of {each.num_keys}": partial(self._run, None, each) for each in splits}
        return ways | self.varlen(setting, self.length)
