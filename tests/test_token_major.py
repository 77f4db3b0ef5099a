"""Token-major schedules against the plain model: whole, and with its cache cut after every chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.architectures import WINDOW, tiny_architecture
from tests.planning import uniform
from tests.references import CutCache, cache_keyword, plain_greedy, plain_logits, storage_bytes
from tidekv_cli.engine.attention import Eager
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.budgets.pyramid import Pyramid
from tidekv_cli.engine.budgets.uniform import EvenHeads
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import Prefilled, PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.engine.selectors.keep_all import KeepAll
from tidekv_cli.engine.selectors.recent import Recent
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.token_major import TokenMajorPrefill

SLACK = 4
WINDOWED = ["mistral", "gemma2", "gpt_oss", "cohere2", "llama4_text"]


@dataclass(frozen=True, slots=True)
class FarKeys(Selector):
    """The keys least like the mean of a head's, and the last `window`; like KeyDiff, it looks at no query."""

    recent: int = 3

    @property
    def mandatory_tokens(self) -> int:
        return self.recent

    def rank(self, view: LayerView, budget: int) -> Ranking:
        unit = F.normalize(view.keys.float(), dim=-1)
        scores = -F.cosine_similarity(unit, unit.mean(1, keepdim=True), dim=-1)
        stop = view.keys.shape[1] - self.recent
        return Ranking(0, stop, iter([scores[:, :stop]]))


SELECTORS = [
    SnapKV(window=8),
    SnapKV(window=8, sinks=3, pool="avg", pool_kernel=5),
    Recent(),
    Recent(sinks=4),
    FarKeys(),
]


def settings(schedule: str, selector: Any, budget: int, chunk: int, **changes: Any) -> PrefillSettings:
    return PrefillSettings(schedule, selector, uniform(budget), FlashCPU(), chunk, 64, SLACK, **changes)


def chunked(chunk: int) -> PrefillSettings:
    return settings("chunked", KeepAll(), 10**6, chunk)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunked_is_the_plain_model(tiny_model: Callable[..., Any], kv_heads: int, chunk: int) -> None:
    model, ids = tiny_model(num_key_value_heads=kv_heads), random_ids(150)
    session = Session(model, frozenset())
    prompt, _ = session.prefill(ids, chunked(chunk))
    whole, _ = session.prefill(ids, settings("oneshot", KeepAll(), 10**6, 64))
    assert error(prompt.logits, plain_logits(model, ids)) <= 1e-5
    for store, expected, kept in zip(prompt.cache, whole.cache, prompt.kept, strict=True):
        assert torch.equal(kept, torch.arange(150).expand(kv_heads, -1))
        assert error(store.keys, expected.keys) <= 1e-5 and error(store.values, expected.values) <= 1e-5
        assert store.nbytes == expected.nbytes
    assert list(session.generate(prompt, SamplingSettings(), 32)) == plain_greedy(model, ids, 32)


@pytest.mark.parametrize("chunk", [1, 30, 50, 75])
def test_chunked_rows_are_those_of_the_same_chunks_layer_by_layer(tiny_model: Callable[..., Any], chunk: int) -> None:
    """Bit for bit; both schedules have a border before the last token, and so the same ones."""
    session, ids = Session(tiny_model(num_hidden_layers=3), frozenset()), random_ids(151)
    prompt, _ = session.prefill(ids, chunked(chunk))
    tide, _ = session.prefill(ids, settings("tide", KeepAll(), 10**6, chunk))
    for store, expected in zip(prompt.cache, tide.cache, strict=True):
        assert torch.equal(store.keys, expected.keys) and torch.equal(store.values, expected.values)


@torch.no_grad()
def eager(model: Any, ids: list[int], count: int) -> tuple[Tensor, list[int]]:
    """Logits [V] after `ids` and greedy tokens of the model as it comes, which reads everything again and again."""
    model.set_attn_implementation("eager")
    logits = [model(input_ids=torch.tensor([ids])).logits[0, -1]]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        tokens.append(int(model(input_ids=torch.tensor([ids + tokens])).logits[0, -1].argmax()))
    return logits[0], tokens


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.usefixtures("one_thread")
def test_layers_with_masks_of_their_own(kind: str) -> None:
    """Of either schedule where nothing is evicted but what a window hides."""
    model, ids = tiny_architecture(kind), random_ids(90)
    expected, tokens = eager(model, ids, 8)
    session = Session(model, frozenset())
    for chunk in (1, 7, 32):
        prompt, _ = session.prefill(ids, chunked(chunk))
        assert error(prompt.logits, expected) <= 1e-5
        assert [store.length for store in prompt.cache] == [90] * 4
        assert list(session.generate(prompt, SamplingSettings(), 8)) == tokens
        prompt, _ = session.prefill(ids, settings("online", SnapKV(window=8), 90, chunk))
        assert error(prompt.logits, expected) <= 1e-5
        for store, kept in zip(prompt.cache, prompt.kept, strict=True):
            assert store.length in (90, WINDOW - 1)
            assert kept.tolist() == [list(range(90 - store.length, 90))] * len(kept)
        assert list(session.generate(prompt, SamplingSettings(), 8)) == tokens


@torch.no_grad()
def cut_after_chunks(
    model: Any, ids: Sequence[int], chunk: int, budget: int, choose: Callable[[Tensor, Tensor], list[list[int]]]
) -> tuple[list[list[list[int]]], Tensor, CutCache]:
    """The plain model read chunk by chunk, its cache cut by `choose` (keys [Hkv, L, D], weights [Hkv, G, n, L]).

    Returns positions by layer and head, the last logits [V], and the cache.
    """
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        cache, logits, fill = CutCache(config=model.config), torch.empty(0), torch.finfo(torch.float32).min
        heads = model.config.num_key_value_heads
        positions: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(model.config.num_hidden_layers)]
        for start in range(0, len(ids), chunk):
            fed = list(ids[start : start + chunk])
            cache.seen, held = start, len(positions[0][0])
            mask = torch.full((1, 1, len(fed), held + len(fed)), fill).triu(held + 1)
            places = torch.arange(start, start + len(fed))[None]
            given = {"input_ids": torch.tensor([fed]), "position_ids": places, cache_keyword(model): cache}
            out = model(**given, attention_mask=mask, use_cache=True, output_attentions=True)
            logits = out.logits[0, -1]
            for own_positions, layer, weights in zip(positions, cache.layers, out.attentions, strict=True):
                for head in own_positions:
                    head += places[0].tolist()
                if held + len(fed) > budget:
                    rows = choose(layer.keys[0], weights[0].unflatten(0, (heads, -1)))
                    own_positions[:] = [[h[r] for r in chosen] for h, chosen in zip(own_positions, rows, strict=True)]
                    layer.keys = torch.stack([k[r] for k, r in zip(layer.keys[0], rows, strict=True)])[None]
                    layer.values = torch.stack([v[r] for v, r in zip(layer.values[0], rows, strict=True)])[None]
        return positions, logits, cache
    finally:
        model.set_attn_implementation(own)


def chosen_by(selector: Any, budget: int) -> Callable[[Tensor, Tensor], list[list[int]]]:
    """What `selector` is to choose, written out."""

    def rows(scores: Tensor, sinks: int, last: int, length: int) -> list[list[int]]:
        always = [*range(sinks), *range(length - last, length)]
        orders = (head.argsort(descending=True, stable=True).tolist() for head in scores)
        free = [[row for row in order if sinks <= row < length - last] for order in orders]
        return [sorted(always + order[: budget - len(always)]) for order in free]

    def choose(keys: Tensor, weights: Tensor) -> list[list[int]]:
        heads, length, _ = keys.shape
        if isinstance(selector, Recent):
            return rows(torch.arange(length).expand(heads, -1), selector.sinks, 1, length)
        if isinstance(selector, FarKeys):
            unit = keys / keys.norm(dim=-1, keepdim=True)
            anchor = unit.mean(1, keepdim=True)
            scores = -(unit * anchor).sum(-1) / anchor.norm(dim=-1)
            return rows(scores, 0, selector.recent, length)
        assert isinstance(selector, SnapKV)
        raw = weights[:, :, -selector.window :, : length - selector.window].flatten(1, 2).mean(1)
        pool = F.max_pool1d if selector.pool == "max" else F.avg_pool1d
        pooled = pool(raw, selector.pool_kernel, stride=1, padding=selector.pool_kernel // 2)
        return rows(F.pad(pooled, (0, selector.window)), selector.sinks, selector.window, length)

    return choose


def check_against_cuts(model: Any, ids: list[int], selector: Any, budget: int, chunk: int, prompt: Prefilled) -> None:
    positions, logits, cache = cut_after_chunks(model, ids, chunk, budget, chosen_by(selector, budget))
    assert [kept.tolist() for kept in prompt.kept] == positions
    assert error(prompt.logits, logits) <= 1e-5
    for store, layer in zip(prompt.cache, cache.layers, strict=True):
        assert error(store.keys, layer.keys) <= 1e-5 and error(store.values, layer.values) <= 1e-5
        rows = min(budget, len(ids))
        assert store.length == store.prompt_length == rows
        assert store.nbytes == (store.keys.nbytes + store.values.nbytes) // rows * (rows + SLACK)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 13, 32, 64, 200])
@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_online_is_the_plain_model_cut_after_every_chunk(
    tiny_model: Callable[..., Any], model_type: str, chunk: int, selector: Any
) -> None:
    model, ids = tiny_model(model_type), random_ids(150)
    prompt, _ = Session(model, frozenset()).prefill(ids, settings("online", selector, 30, chunk))
    check_against_cuts(model, ids, selector, 30, chunk, prompt)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_short_prompts(tiny_model: Callable[..., Any], selector: Any) -> None:
    model = tiny_model()
    session = Session(model, frozenset())
    for length in range(1, 8 + 14 + 3):
        ids = random_ids(length)
        for chunk in (3, 512):
            for budget in (14, selector.mandatory_tokens):
                prompt, _ = session.prefill(ids, settings("online", selector, budget, chunk))
                check_against_cuts(model, ids, selector, budget, chunk, prompt)
                assert len(list(session.generate(prompt, SamplingSettings(), 2))) == 2
            whole, _ = session.prefill(ids, chunked(chunk))
            assert error(whole.logits, plain_logits(model, ids)) <= 1e-5


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_a_budget_of_the_prompt_is_the_plain_model(tiny_model: Callable[..., Any], chunk: int) -> None:
    model, ids = tiny_model(), random_ids(100)
    session = Session(model, frozenset())
    for budget in (100, 10**6):
        prompt, _ = session.prefill(ids, settings("online", SnapKV(window=8), budget, chunk))
        assert error(prompt.logits, plain_logits(model, ids)) <= 1e-5
        assert list(session.generate(prompt, SamplingSettings(), 32)) == plain_greedy(model, ids, 32)


def test_decoding_after_it_is_decoding_with_the_cut_cache(tiny_model: Callable[..., Any]) -> None:
    model, ids, selector = tiny_model(), random_ids(120), SnapKV(window=8)
    session = Session(model, frozenset())
    prompt, _ = session.prefill(ids, settings("online", selector, 30, 16))
    _, _, cache = cut_after_chunks(model, ids, 16, 30, chosen_by(selector, 30))
    tokens = list(session.generate(prompt, SamplingSettings(), 8))  # more than the slack
    expected = [tokens[0]]
    session.adapter.model.set_attn_implementation("eager")
    with torch.no_grad():
        for position in range(120, 127):
            cache.seen = position
            given = {"input_ids": torch.tensor([expected[-1:]]), "position_ids": torch.tensor([[position]])}
            logits = model(**given, **{cache_keyword(model): cache}, use_cache=True).logits
            expected.append(int(logits[0, -1].argmax()))
    assert tokens == expected


def test_what_a_layer_holds_is_never_more_than_its_budget(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all layers' budgets sum up, where they differ."""
    model, ids = tiny_model(num_hidden_layers=5), torch.tensor([random_ids(300)])
    pyramid = BudgetPolicy(40, Pyramid(beta=4), EvenHeads())
    changed = PrefillSettings("online", SnapKV(window=8), pyramid, FlashCPU(), 32, 64, SLACK)
    seen: list[list[int]] = []

    def look(tokens: int) -> str | None:
        held = [layer.store.length for layer in prefill._layers] if seen else []
        seen.append(held)
        return None

    session = Session(model, frozenset())
    prefill = TokenMajorPrefill(session.adapter, ids, changed, shortage=look)
    row = 2 * 2 * 16 * 4
    meter = LiveMeter()
    with meter:
        prompt = prefill.run()
    budgets = [store.length for store in prompt.cache]
    assert sum(budgets) == 5 * 40 and budgets == sorted(budgets, reverse=True) and budgets[0] > budgets[-1]
    for chunk, held in enumerate(seen[1:], 1):
        assert held == [min(32 * chunk, budget) for budget in budgets]
    assert sum(store.nbytes for store in prompt.cache) == row * sum(budget + SLACK for budget in budgets)
    assert meter.peak["active_kv"] in (0, row * (budgets[0] + 32))
    assert all((kept.diff() > 0).all() and kept[:, -8:].tolist() == [list(range(292, 300))] * 2 for kept in prompt.kept)


def test_only_ids_grow_with_the_prompt(tiny_model: Callable[..., Any]) -> None:
    session = Session(tiny_model(), frozenset())

    def peak(length: int) -> int:
        return session.prefill(random_ids(length), settings("online", SnapKV(), 64, 32))[1]

    assert peak(1600) - peak(800) == 800 * 8


@pytest.mark.parametrize("schedule", ["chunked", "online"])
def test_nothing_but_the_result_stays_alive(tiny_model: Callable[..., Any], schedule: str) -> None:
    model = tiny_model()
    session, ids = Session(model, frozenset()), torch.tensor([random_ids(300)])
    meter = LiveMeter()
    meter.watch([ids, *model.parameters(), *model.buffers()])
    before = meter.live_bytes
    with meter:
        prompt = TokenMajorPrefill(session.adapter, ids, settings(schedule, SnapKV(), 64, 32)).run()
    held = sum(store.nbytes for store in prompt.cache) + storage_bytes([*prompt.kept, prompt.logits])
    assert meter.live_bytes - before == held
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    del prompt
    with meter, pytest.raises(ZeroDivisionError):
        TokenMajorPrefill(session.adapter, ids, settings(schedule, SnapKV(), 64, 32)).run()
    hook.remove()
    assert meter.live_bytes == before


@pytest.mark.parametrize("schedule", ["chunked", "online"])
def test_the_second_prompt_is_what_a_fresh_session_gives(tiny_model: Callable[..., Any], schedule: str) -> None:
    used = Session(tiny_model(), frozenset())
    used.prefill(random_ids(500), settings(schedule, SnapKV(), 64, 32))
    case = settings(schedule, SnapKV(), 48, 32)
    again, again_peak = used.prefill(random_ids(90, seed=1), case)
    fresh, fresh_peak = Session(tiny_model(), frozenset()).prefill(random_ids(90, seed=1), case)
    assert torch.equal(again.logits, fresh.logits) and again_peak == fresh_peak
    assert all(torch.equal(a, b) for a, b in zip(again.kept, fresh.kept, strict=True))


@pytest.mark.parametrize("schedule", ["chunked", "online"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_move_are_those_of_the_whole_prompt(
    tiny_model: Callable[..., Any], kind: str, schedule: str
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}
    rotation = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rotation |= factors if kind == "longrope" else {}
    model, ids = tiny_model(rope_parameters=rotation, max_position_embeddings=64), random_ids(150)
    expected = plain_logits(tiny_model(rope_parameters=rotation, max_position_embeddings=64), ids)
    for chunk in (20, 150):
        prompt, _ = Session(model, frozenset()).prefill(ids, settings(schedule, SnapKV(), 150, chunk))
        assert error(prompt.logits, expected) <= 1e-5


@pytest.mark.parametrize("schedule", ["chunked", "online"])
def test_progress_reaches_its_total(tiny_model: Callable[..., Any], schedule: str) -> None:
    seen: list[tuple[int, int]] = []
    case = settings(schedule, SnapKV(), 64, 32)
    Session(tiny_model(), frozenset()).prefill(random_ids(100), case, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_any_backend_will_do(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(), frozenset()), random_ids(150)
    found = [
        session.prefill(ids, PrefillSettings("online", SnapKV(window=8), uniform(30), backend, 16, 64, SLACK))[0]
        for backend in (FlashCPU(), Eager())
    ]
    assert error(found[0].logits, found[1].logits) <= 1e-5
    assert all(torch.equal(one, two) for one, two in zip(found[0].kept, found[1].kept, strict=True))
