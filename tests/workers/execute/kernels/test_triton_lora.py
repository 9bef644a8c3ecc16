"""What the kernels of adapters add, against float64, each row's adapter by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch

from tests.conftest import HAS_GPU

pytest.importorskip("triton")

from triptych.workers.execute.kernels.triton_lora import group_rows
from triptych.workers.execute.model.grouped_lora import GroupedAdapters, GroupedLinear
from triptych.workers.execute.model.lora import Adapter, LowRank

# What nothing reads is added up too: the sums of rows without an adapter, which are whatever the memory held.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in add:RuntimeWarning")

DEVICE = "cuda" if HAS_GPU else "cpu"
SIZES = {"q": 24, "k": 136}  # outputs: less than a program's, and more
BEFORE_K = 40  # outputs of the whole product: 16 between q and k that no adapter changes
NUM_OUTPUTS = BEFORE_K + SIZES["k"]
Updates = list[dict[str, LowRank]]


class Scene(NamedTuple):
    """Adapters for two matrices of a merged product."""

    grouped: GroupedAdapters
    linear: GroupedLinear
    updates: Updates

    def add(self, x: torch.Tensor, owners: Iterable[int], output: torch.Tensor | None = None) -> torch.Tensor:
        """The result of adding to ``output``, or to ones."""
        output = (torch.ones(len(x), NUM_OUTPUTS, dtype=x.dtype) if output is None else output.clone()).to(DEVICE)
        rows = self.grouped.rows_of(torch.tensor([*owners], dtype=torch.int32, device=DEVICE))
        self.linear.add(x.to(DEVICE), output, rows)
        return output.cpu()

    def expected(self, x: torch.Tensor, owners: Iterable[int]) -> torch.Tensor:
        total = torch.ones(len(x), NUM_OUTPUTS, dtype=torch.float64)
        for row, owner in enumerate(owners):
            for name, (a, b) in self.updates[owner - 1].items() if owner else ():
                first = BEFORE_K if name == "k" else 0
                total[row, first : first + len(b)] += b.double() @ (a.double() @ x[row].double())
        return total


def make_scene(
    ranks: Iterable[int] = (3, 16, 70), num_inputs: int = 96, dtype: torch.dtype = torch.float32, *, whole: bool = False
) -> Scene:
    """The last adapter only changes the second matrix. Inner sums of ``whole`` numbers are exact."""
    torch.manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape).float() if whole else torch.randn(*shape)

    updates: Updates = [
        {name: LowRank(numbers(rank, num_inputs).to(dtype), numbers(n, rank) * 257 / 4096) for name, n in SIZES.items()}
        for rank in ranks
    ]
    del updates[-1]["q"]
    adapters = [Adapter("", each) for each in updates]
    grouped, like = GroupedAdapters(adapters, torch.device(DEVICE)), torch.empty(0, dtype=dtype, device=DEVICE)
    matrices = [
        (first, {i: each[name] for i, each in enumerate(updates) if name in each})
        for first, name in ((0, "q"), (SIZES["q"], "none"), (BEFORE_K, "k"))
    ]
    return Scene(grouped, grouped.stack_merged(matrices, like=like), updates)


def drawn(num_rows: int, num_adapters: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(num_adapters + 1, (num_rows,), generator=generator).tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33, 256, 257, 300])
def test_each_row_gets_its_own_adapter(num_rows: int) -> None:
    scene, owners = make_scene(), drawn(num_rows)
    x = torch.randn(num_rows, 96)
    torch.testing.assert_close(scene.add(x, owners).double(), scene.expected(x, owners), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_inputs", [8, 1024, 1032, 2500])
def test_inputs_are_summed_over_all_splits(num_inputs: int) -> None:
    scene, owners = make_scene((3, 16), num_inputs), [2, 0, 1, 2, 1]
    x = torch.randn(5, num_inputs)
    torch.testing.assert_close(scene.add(x, owners).double(), scene.expected(x, owners), rtol=1e-5, atol=1e-3)


def test_rows_of_half_precision_are_rounded_once() -> None:
    """All but the last rounding is exact here."""
    scene, owners = make_scene((3, 16), 40, torch.float16, whole=True), drawn(40, 2)
    x = torch.randint(-2, 3, (40, 40)).half()
    assert torch.equal(scene.add(x, owners), scene.expected(x, owners).half())


@pytest.mark.parametrize("is_transposed", [False, True], ids=["of rows", "transposed"])
def test_rows_of_views_are_found(is_transposed: bool) -> None:
    """Inputs may be columns of a larger matrix, and outputs too."""
    scene, owners = make_scene(), [3, 1, 0, 2]
    wide, output = torch.randn(4, 200).to(DEVICE), torch.ones(4, 300).to(DEVICE)
    x = wide.T.contiguous().T[:, 7:103] if is_transposed else wide[:, 7:103]
    tiles = scene.grouped.rows_of(torch.tensor(owners, dtype=torch.int32, device=DEVICE))
    scene.linear.add(x, output[:, 5 : 5 + NUM_OUTPUTS], tiles)
    expected = torch.ones(4, 300, dtype=torch.float64)
    expected[:, 5 : 5 + NUM_OUTPUTS] = scene.expected(x.cpu(), owners)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.usefixtures("rows_by_themselves")
@pytest.mark.parametrize("num_inputs", [96, 1100])
def test_bits_of_a_row_do_not_depend_on_the_batch(num_inputs: int) -> None:
    """Nor on whether its tile is one for few or for many rows."""
    scene, owners = make_scene(num_inputs=num_inputs), drawn(300)
    x = torch.randn(300, num_inputs)
    many, few = scene.add(x, owners), scene.add(x[:70], owners[:70])
    assert torch.equal(many[:70], few)
    assert all(torch.equal(scene.add(x[i : i + 1], owners[i : i + 1])[0], few[i]) for i in range(8))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_adapter_that_overflows_only_spoils_its_rows(poison: float) -> None:
    scene, owners = make_scene(), drawn(40)
    x = torch.randn(40, 96)
    before = scene.add(x, owners)
    scene.linear.down[2 * 8 : 2 * (8 + 16)] = poison
    after = scene.add(x, owners)
    is_spoilt = torch.tensor(owners) == 2
    assert not after[is_spoilt][:, :24].isfinite().any()
    assert torch.equal(after[~is_spoilt], before[~is_spoilt])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_row_that_overflows_spoils_no_other() -> None:
    scene, owners = make_scene(), [1, 1, 2, 0]
    x = torch.randn(4, 96)
    before = scene.add(x, owners)
    x[1] = torch.nan
    x[3] = torch.inf
    after = scene.add(x, owners)
    assert after[1, :24].isnan().all()
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_rows_without_an_adapter_are_not_touched() -> None:
    """Not even their zeros: to add one would change the sign of another."""
    output = torch.full((3, NUM_OUTPUTS), -0.0)
    after = make_scene().add(torch.randn(3, 96), [0, 1, 0], output)
    assert after[[0, 2]].signbit().all()
    after = make_scene().add(torch.randn(3, 96), [0, 0, 0], output)
    assert after.signbit().all()


@pytest.mark.parametrize("num_rows", [1, 17, 200, 600])
@pytest.mark.parametrize("num_adapters", [1, 5, 64])
def test_tiles_have_all_rows_of_their_adapters_in_order(num_rows: int, num_adapters: int) -> None:
    owners = drawn(num_rows, num_adapters)
    starts = torch.arange(num_adapters, dtype=torch.int32, device=DEVICE) * 8
    tiles = group_rows(torch.tensor(owners, dtype=torch.int32, device=DEVICE), starts, torch.full_like(starts, 8))
    spans, rows, found = tiles.spans.tolist(), tiles.rows.tolist(), dict[int, list[int]]()
    for (start, width), of_tile in zip(spans, rows, strict=True):
        if width:
            found.setdefault(1 + start // 8, []).extend(row for row in of_tile if row >= 0)
    assert found == {n: own for n in range(1, 1 + num_adapters) if (own := [i for i, o in enumerate(owners) if o == n])}
    assert sum(row >= 0 for (_, width), of_tile in zip(spans, rows, strict=True) if width for row in of_tile) == sum(
        owner > 0 for owner in owners
    )


def test_sums_over_ranks_are_taken_between_the_products() -> None:
    """Each rank has half of the inputs. All of a row's inner sums of a rank are in one piece."""
    scene, owners = make_scene((3, 16), 2400), drawn(20, 2)
    x, inner = torch.randn(20, 2400), list[torch.Tensor]()
    halves = [
        [{name: LowRank(a[:, part], b) for name, (a, b) in each.items()} for each in scene.updates]
        for part in (slice(1200), slice(1200, None))
    ]

    def of_rank(rank: int, sum_ranks: object) -> torch.Tensor:
        updates = {i: each["k"] for i, each in enumerate(halves[rank])}
        like = torch.empty(0, device=DEVICE)
        linear = scene.grouped.stack(updates, like=like, sum_ranks=sum_ranks)  # type: ignore[arg-type]
        output, tiles = (
            torch.zeros(20, SIZES["k"]).to(DEVICE),
            scene.grouped.rows_of(torch.tensor(owners, dtype=torch.int32, device=DEVICE)),
        )
        linear.add(x[:, 1200 * rank : 1200 * (rank + 1)].to(DEVICE), output, tiles)
        return output.cpu()

    of_rank(0, inner.append)
    assert len(inner[0]) == 1
    total = of_rank(1, lambda own: own.add_(inner[0]))
    expected = scene.expected(x, owners)[:, BEFORE_K:] - 1
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 32, 256, 2048])
def test_rows_of_bfloat16_are_those_of_float64(num_rows: int) -> None:
    """With the sizes of a model, and equal bits alone and together."""
    scene, owners = make_scene((16, 64, 8), 4096, torch.bfloat16), drawn(num_rows)
    x = torch.randn(num_rows, 4096).bfloat16() / 64
    together = scene.add(x, owners)
    torch.testing.assert_close(together.double(), scene.expected(x, owners), rtol=2**-7, atol=0.1)
    for i in range(0, num_rows, 97):
        assert torch.equal(scene.add(x[i : i + 1], owners[i : i + 1])[0], together[i])
