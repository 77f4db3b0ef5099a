"""Budget policies: sums are exact, caps hold, and what each layer and head gets is what the formulas say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import exp, floor, inf

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.references_selectors import BLOCKS, SHAPES, best_rows, layer, window_weights
from tidekv_cli.engine.budgets import Layers
from tidekv_cli.engine.budgets.ada import AdaHeads
from tidekv_cli.engine.budgets.apportion import apportion
from tidekv_cli.engine.budgets.cake import Cake
from tidekv_cli.engine.budgets.pyramid import Pyramid
from tidekv_cli.engine.budgets.uniform import EvenHeads, EvenLayers
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.engine.selectors.keydiff import KeyDiff
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.errors import UsageError


@pytest.mark.parametrize("case", range(200))
def test_apportion(case: int) -> None:
    """The sum is exact, caps hold, and who is below the cap gets its proportion within one row."""
    draw = random.Random(case)
    count = draw.randrange(1, 12)
    weights = [draw.choice([0.0, draw.random(), draw.random() * 1e6, 1.0]) for _ in range(count)]
    most = [draw.choice([0, 3, draw.randrange(50), 1000]) for _ in range(count)]
    total = draw.randrange(sum(most) + 20)
    shares = apportion(weights, total, most)
    assert sum(shares) == min(total, sum(most))
    assert all(0 <= share <= limit for share, limit in zip(shares, most, strict=True))
    free = [place for place in range(count) if shares[place] < most[place]]
    spread = sum(shares[place] for place in free)
    weight = sum(weights[place] for place in free)
    for place in free if weight and total < sum(most) else []:  # rounded up to its cap, one may be missing here
        assert abs(shares[place] - spread * weights[place] / weight) < 2
    for one in range(count):
        for other in range(count):
            if weights[one] > weights[other] and most[one] >= most[other]:
                assert shares[one] >= shares[other] - (1 if weights[one] == 0 else 0)


def test_apportion_by_hand() -> None:
    assert apportion([1, 1, 1], 10, [9, 9, 9]) == [4, 3, 3]  # ties to the earlier
    assert apportion([1, 2, 3], 12, [9, 9, 9]) == [2, 4, 6]
    assert apportion([1, 2, 3], 12, [9, 9, 4]) == [3, 5, 4]  # 8 / 3 and 16 / 3: the greater remainder
    assert apportion([0, 0, 5], 7, [9, 9, 4]) == [2, 1, 4]  # who weighs nothing gets what others cannot take
    assert apportion([0.0, 0.0], 5, [9, 9]) == [3, 2]
    assert apportion([1, 1], 50, [9, 3]) == [9, 3]
    assert apportion([1e300, 1e-300], 5, [9, 9]) == [5, 0]
    assert apportion([5], 0, [9]) == [0]


def test_pyramid_is_the_papers_line() -> None:
    layers = Layers(count=32, length=10_000, mandatory=8, budget=128)
    rows = list(Pyramid().begin(layers).read(31, None))
    assert sum(rows) == 32 * 128  # the authors' own rounding gives 4,272
    least = 120 // 20
    line = [Fraction(240 - least) - Fraction(2 * (120 - least), 31) * number for number in range(32)]
    assert rows[0] == 8 + 240 - least and rows[-1] == 8 + least
    assert all(abs(row - 8 - exact) < 1 for row, exact in zip(rows, line, strict=True))
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("case", range(100))
def test_pyramid_sums_are_exact(case: int) -> None:
    draw = random.Random(case)
    layers = Layers(draw.choice([1, 2, 32]), draw.randrange(1, 300), draw.randrange(40), draw.randrange(1, 200))
    layers = Layers(layers.count, layers.length, layers.mandatory, max(layers.budget, layers.mandatory))
    rows = list(Pyramid(draw.choice([1, 3, 20])).begin(layers).read(layers.count - 1, None))
    assert sum(rows) == layers.count * min(layers.budget, layers.length)
    assert all(min(layers.mandatory, layers.length) <= row <= layers.length for row in rows)
    assert rows == sorted(rows, reverse=True)


def test_pyramid_of_a_prompt_shorter_than_its_greatest_budget() -> None:
    """What the first layers cannot hold goes to the others in proportion to their own."""
    layers = Layers(count=4, length=150, mandatory=0, budget=100)
    # The line 195, 131.67, 68.33, 5: once the first is cut to 150, the others share 250 as 131.67 : 68.33 : 5.
    # That is 160.6, 83.3, 6.1, so the second is cut too, and 100 is shared as 68.33 : 5, which is 93.2, 6.8.
    assert list(Pyramid().begin(layers).read(3, None)) == [150, 150, 93, 7]


def test_one_layer_gets_the_mean_and_a_budget_above_the_prompt_keeps_all() -> None:
    assert list(Pyramid().begin(Layers(1, 500, 8, 100)).read(0, None)) == [100]
    for length in (40, 90, 100):
        assert list(Pyramid().begin(Layers(3, length, 8, 100)).read(2, None)) == [length] * 3
        assert list(EvenLayers().begin(Layers(3, length, 8, 100)).read(1, None)) == [length] * 2
    with pytest.raises(UsageError, match="beta=0"):
        Pyramid(0)


@dataclass
class Given(Selector):
    """Ranks by scores that are given, [Hkv, S], all but the first `sinks` and the last `window` rows."""

    scores: Tensor
    sinks: int = 0
    last: int = 1

    @property
    def mandatory_tokens(self) -> int:
        return self.sinks + self.last

    def rank(self, view: LayerView, budget: int) -> Ranking:
        stop = self.scores.shape[1] - self.last
        return Ranking(self.sinks, stop, iter(self.scores[:, self.sinks : stop].split(view.score_block, 1)))


def drawn(case: int) -> tuple[Given, LayerView, int]:
    """Scores with many ties, on some heads higher than on others, and a budget."""
    draw, heads = random.Random(case), [1, 2, 3, 8][case % 4]
    torch.manual_seed(case)
    sinks, last = draw.randrange(3), draw.randrange(1, 6)
    length = sinks + last + draw.randrange(1, 80)
    scores = (torch.rand(heads, length) * torch.rand(heads, 1) * draw.choice([3, 1000])).floor()
    view = LayerView(torch.zeros(heads, length, 2), None, draw.choice([1, 7, 64]))
    return Given(scores, sinks, last), view, draw.randrange(sinks + last, length + 1)


def joint_counts(scores: Sequence[Sequence[float]], best: int) -> list[int]:
    """How many of the `best` highest of all heads' scores each head has; of equal ones the earlier row, then head."""
    order = sorted((-score, row, head) for head, own in enumerate(scores) for row, score in enumerate(own))
    return [sum(head == own for _, _, own in order[:best]) for head in range(len(scores))]


def rounded(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers of the same sum: the largest remainders are rounded up, of equal ones the earlier."""
    whole = [floor(share) for share in shares]
    missing = int(sum(shares)) - sum(whole)
    for place in sorted(range(len(shares)), key=lambda place: (whole[place] - shares[place], place))[:missing]:
        whole[place] += 1
    return whole


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("case", range(50))
def test_ada_equals_its_formulas(alpha: float, case: int) -> None:
    selector, view, budget = drawn(case)
    heads, length = selector.scores.shape
    sinks, stop = selector.sinks, length - selector.last
    mean = budget - selector.mandatory_tokens
    free = selector.scores[:, sinks:stop]
    part = Fraction(str(alpha))
    counts = joint_counts(free.tolist(), heads * mean)
    shares = rounded([(1 - part) * count + part * mean for count in counts])
    expected = [
        [*range(sinks), *(row + sinks for row in best_rows(own, share)), *range(stop, length)]
        for own, share in zip(free, shares, strict=True)
    ]
    found = AdaHeads(alpha).select(selector, view, budget)
    assert [rows.tolist() for rows in found.by_head(found.indices)] == expected
    assert found.indices.numel() == heads * budget and (found.counts is None or sum(found.counts) == heads * budget)
    if alpha == 1.0:
        assert [rows.tolist() for rows in found.by_head(found.indices)] == selector.select(
            view, budget
        ).indices.tolist()


def test_ada_ranks_what_is_no_number_last() -> None:
    scores = torch.tensor([[float("nan"), 1.0, float("nan"), 2.0, 0.0], [3.0, float("nan"), 4.0, 5.0, 0.0]])
    found = AdaHeads(0.0).select(Given(scores), LayerView(torch.zeros(2, 5, 2), None, 2), 3)
    assert [rows.tolist() for rows in found.by_head(found.indices)] == [[3, 4], [0, 2, 3, 4]]
    assert found.scores is not None and not found.scores.isnan().any()


def test_ada_by_the_authors_default() -> None:
    """alpha=0.2 is no binary fraction: rounding it must not move a row."""
    scores = torch.cat((torch.arange(100.0, 0, -1)[None], torch.zeros(3, 100)))
    found = AdaHeads().select(Given(scores), LayerView(torch.zeros(4, 100, 2), None, 64), 11)
    assert found.counts == (1 + 34, 1 + 2, 1 + 2, 1 + 2)  # 0.8 x 40 + 0.2 x 10, and 0.2 x 10
    with pytest.raises(UsageError, match="alpha=2"):
        AdaHeads(2)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("case", range(50))
def test_ada_trims_by_the_same_formulas(alpha: float, case: int) -> None:
    selector, view, budget = drawn(case)
    heads, always = len(selector.scores), selector.mandatory_tokens
    held = AdaHeads(alpha).select(selector, view, budget)
    if held.scores is None:  # nothing but what always stays, which is never trimmed
        assert budget == always
        return
    smaller = random.Random(case).randrange(always, budget + 1)
    rows = AdaHeads(alpha).trim(held, smaller, always)
    part, own = Fraction(str(alpha)), held.by_head(held.scores)
    counts = joint_counts([scores.tolist() for scores in own], heads * smaller)
    shares = [(1 - part) * (count - always) + part * (smaller - always) for count in counts]
    most = [len(scores) - always for scores in own]
    wanted = [always + share for share in apportion(shares, heads * (smaller - always), most)]
    assert rows.counts == tuple(wanted) and sum(wanted) == heads * smaller
    for chosen, scores, kept, count in zip(
        rows.by_head(rows.indices), own, held.picked(rows).by_head(held.picked(rows).indices), wanted, strict=True
    ):
        assert chosen.tolist() == best_rows(scores, count)
        assert (kept.diff() > 0).all()
        assert kept[: selector.sinks].tolist() == list(range(selector.sinks))
        assert kept[-selector.last :].tolist() == list(range(view.keys.shape[1] - selector.last, view.keys.shape[1]))


@pytest.mark.parametrize("case", range(50))
def test_even_heads_trim_to_what_the_smaller_budget_selects(case: int) -> None:
    selector, view, budget = drawn(case)
    held = EvenHeads().select(selector, view, budget)
    always = selector.mandatory_tokens
    if held.scores is None:
        assert budget == always
        return
    smaller = random.Random(case).randrange(always, budget + 1)
    found = held.picked(EvenHeads().trim(held, smaller, always))
    expected = selector.select(view, smaller)
    assert torch.equal(found.indices, expected.indices)
    assert expected.scores is None or (found.scores is not None and torch.equal(found.scores, expected.scores))


def test_ada_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        seen = Observation(torch.empty(8, 4, 16), torch.empty(8, 4), 1.0)
        view = LayerView(torch.empty(2, 300, 16), seen, 64)
        held = AdaHeads().select(SnapKV(window=4), view, 40)
        assert held.counts == (40, 40) and held.indices.shape == (80,)
        rows = AdaHeads().trim(held, 30, 4)
        assert rows.counts == (30, 30) and held.picked(rows).indices.shape == (60,)


def preference_by_definition(view: LayerView, tau1: float, tau2: float) -> float:
    """From the probabilities of every query head."""
    weights = window_weights(view)
    probabilities = (weights * weights.shape[2] * weights.shape[3]).double()
    entropy = -torch.where(probabilities > 0, probabilities * probabilities.log(), 0.0).sum().item()
    return entropy ** (1 / tau1) * probabilities.var(3).sum().item() ** (1 / tau2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "zero keys", "repeated keys"])
@pytest.mark.parametrize("taus", [(1.6, 0.4), (1.0, 1.0)])
def test_cake_prefers_what_its_formula_says(shape: tuple[int, int], kind: str, taus: tuple[float, float]) -> None:
    view = layer(7, 260, shape, 16, kind)
    expected = preference_by_definition(view, *taus)
    found = [Cake(*taus).preference(LayerView(view.keys, view.observation, block)) for block in BLOCKS]
    assert found == pytest.approx([expected] * len(BLOCKS), rel=1e-4)
    assert found == pytest.approx([found[0]] * len(BLOCKS), rel=1e-12)


@pytest.mark.parametrize(("kind", "window", "length"), [("plain", 1, 50), ("equal keys", 8, 50), ("plain", 8, 8)])
def test_cake_without_anything_to_tell_layers_apart(kind: str, window: int, length: int) -> None:
    view = layer(0, length, (2, 2), window, kind)
    assert Cake().preference(view) == pytest.approx(0.0, abs=1e-6)
    budgets = Cake().begin(Layers(2, 500, 8, 100))
    for number in range(2):
        rows = budgets.read(number, layer(0, 50, (2, 2), 1, "plain"))
    assert list(rows) == [100, 100]


def test_cake_of_extreme_exponents_and_values() -> None:
    view = layer(3, 200, (2, 4), 16, "plain")
    for taus in ((1e-3, 1e-3), (1e-3, 1e3), (1e3, 1e-3), (1e-3, 1.0)):
        found = Cake(*taus).preference(view)
        assert 0.0 <= found < inf
    odd = Observation(torch.full((8, 16, 16), float("nan")), torch.zeros(8, 16), 1.0)
    assert Cake().preference(LayerView(view.keys, odd, 64)) == 0.0
    for taus in ((1.0, 0.0), (1e-300, 1.0), (inf, 1.0), (1.0, float("nan"))):
        with pytest.raises(UsageError, match="tau2="):
            Cake(*taus)


@pytest.mark.parametrize("case", range(50))
def test_cake_budgets_never_rise_again_and_sum_up(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(case)
    preferences = [draw.choice([0.0, draw.random(), exp(draw.uniform(-200, 200))]) for _ in range(draw.randrange(1, 9))]
    count, mandatory = len(preferences), draw.randrange(20)
    length, budget = draw.randrange(1, 300), mandatory + draw.randrange(1, 200)
    layers = Layers(count, length, mandatory, budget)
    view, always = LayerView(torch.zeros(1, 1, 1), None, 64), min(mandatory, length)
    given = iter(preferences)
    monkeypatch.setattr(Cake, "preference", lambda *_: next(given))
    budgets, before = Cake().begin(layers), []
    for number in range(count):
        rows = list(budgets.read(number, view))
        assert len(rows) == number + 1 and all(always <= row <= length for row in rows)
        assert all(row <= earlier for row, earlier in zip(rows[:-1], before, strict=True))
        assert sum(rows) - len(rows) * always == min(layers.free_total, len(rows) * layers.free_most)
        before = rows
    assert sum(before) == count * min(budget, length)


def test_cake_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preferences 1, 3, 4; 300 rows to share, and at most 150 a layer."""
    given = iter([1.0, 3.0, 4.0])
    monkeypatch.setattr(Cake, "preference", lambda *_: next(given))
    budgets = Cake().begin(Layers(3, 150, 0, 100))
    view = LayerView(torch.zeros(1, 1, 1), None, 64)
    assert list(budgets.read(0, view)) == [150]
    assert list(budgets.read(1, view)) == [150, 150]
    assert list(budgets.read(2, view)) == [38, 112, 150]  # 37.5 and 112.5 of what is left: the earlier is rounded up


def test_a_plan_of_cake_is_even_and_may_leave_layers_out() -> None:
    layers = Layers(32, 5000, 32, 1024)
    assert list(Cake().begin(layers).read(31, None)) == [1024] * 32
    assert list(Cake().begin(layers).read(3, None)) == [5000] * 4
    stepwise, at_once = Cake().begin(layers), Cake().begin(layers)
    for number in range(31):
        stepwise.read(number, None)
    assert list(stepwise.read(31, None)) == list(at_once.read(31, None))


def test_a_model_whose_layers_all_have_windows_shares_nothing() -> None:
    for policy in (EvenLayers(), Pyramid(), Cake()):
        policy.begin(Layers(0, 100, 8, 40))


@pytest.mark.parametrize("budget", [1, 2, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_no_head_is_left_without_a_row(alpha: float, budget: int) -> None:
    """Where nothing always stays, as with KeyDiff, and a head's keys are alike."""
    keys = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    keys[0] = keys[0, :1]
    found = AdaHeads(alpha).select(KeyDiff(), LayerView(keys, None, 16), budget)
    assert found.counts is not None and sum(found.counts) == 2 * budget and min(found.counts) >= 1
