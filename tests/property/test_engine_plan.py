"""Plans over many models and devices: what they add up to, and which way they move."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.core.engine_plan import STEPS_IN_FLIGHT, EnginePlan, NoFit, Wish, plan_engine
from hybridsched.core.gpus import GIB, GPUS, Device, slices, whole
from hybridsched.core.model_shape import DTYPE_BYTES, Attention, LayerGroup, ModelShape, Weights, kv_pool

DEVICES = [device for gpu in GPUS for device in (whole(gpu), *slices(gpu))]


@st.composite
def groups(draw: st.DrawFn, heads: int) -> LayerGroup:
    kind = draw(st.sampled_from([Attention.FULL, Attention.SLIDING]))
    return LayerGroup(
        attention=kind,
        layers=draw(st.integers(1, 64)),
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        key_size=draw(st.sampled_from([64, 128])),
        value_size=128,
        window_tokens=draw(st.integers(64, 8192)) if kind is Attention.SLIDING else None,
    )


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    heads = draw(st.sampled_from([8, 12, 32, 64]))
    return ModelShape(
        architecture="LlamaForCausalLM",
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        hidden_size=heads * 128,
        mlp_width=draw(st.integers(512, 65_536)),
        vocab_size=draw(st.integers(512, 262_144)),
        attention_heads=heads,
        groups=tuple(draw(st.lists(groups(heads), min_size=1, max_size=2))),
        own_length_tokens=draw(st.integers(256, 131_072)),
        weights=Weights(
            divided_bytes=draw(st.integers(1, 200 * 2**30)),
            kv_divided_bytes=draw(st.integers(0, 2**30)),
            copied_bytes=draw(st.integers(0, 2**24)),
            tensors=1,
            quantized=draw(st.sampled_from([None, "awq"])),
        ),
    )


devices = st.sampled_from(DEVICES)
lengths = st.lists(st.integers(1, 200_000), max_size=30).map(lambda found: tuple(sorted(found)))


@given(shape=shapes(), device=devices, trace=lengths, gpus=st.integers(1, 8))
def test_a_plan_adds_up_and_holds_what_it_promises(
    shape: ModelShape, device: Device, trace: tuple[int, ...], gpus: int
) -> None:
    wish = Wish(device=device, gpus=1 if device.profile else gpus, lengths=trace)
    found = plan_engine(shape, wish)
    if isinstance(found, NoFit):
        assert found.why
        return
    assert found.memory_bytes == device.memory_bytes
    assert found.gpu_memory_utilization is not None
    used = found.weights_bytes + found.activation_bytes + found.overhead_bytes + found.kv_bytes
    assert used == int(device.memory_bytes * found.gpu_memory_utilization) < device.memory_bytes
    assert 1 <= found.max_model_len <= shape.own_length_tokens
    assert 1 <= found.max_num_seqs <= found.max_num_batched_tokens
    assert found.full_length_requests >= 1.0
    assert found.tensor_parallel in (1, 2, 4, 8)
    assert found.tensor_parallel <= wish.gpus
    assert shape.attention_heads % found.tensor_parallel == 0
    pool = kv_pool(shape, DTYPE_BYTES[shape.dtype], found.tensor_parallel, found.block_tokens)
    in_flight = STEPS_IN_FLIGHT * found.max_num_batched_tokens
    assert found.kv_tokens <= found.full_length_requests * found.max_model_len
    assert pool.sequence_bytes(found.max_model_len, in_flight) <= found.kv_bytes


@given(shape=shapes(), device=devices, one=st.integers(1, 131_072), other=st.integers(1, 131_072))
def test_a_shorter_length_fits_where_a_longer_one_does(
    shape: ModelShape, device: Device, one: int, other: int
) -> None:
    low, high = sorted((min(one, shape.own_length_tokens), min(other, shape.own_length_tokens)))
    longer = plan_engine(shape, Wish(device=device, max_model_len=high))
    if isinstance(longer, NoFit):
        return
    shorter = plan_engine(shape, Wish(device=device, max_model_len=low))
    assert isinstance(shorter, EnginePlan)
    assert shorter.full_length_requests >= longer.full_length_requests
    assert shorter.kv_bytes == longer.kv_bytes


@given(shape=shapes(), device=devices, one=st.integers(1, 4096), other=st.integers(1, 4096))
def test_more_requests_at_once_leave_no_more_for_the_kv_cache(
    shape: ModelShape, device: Device, one: int, other: int
) -> None:
    low, high = sorted((one, other))
    many = plan_engine(shape, Wish(device=device, max_num_seqs=high))
    if isinstance(many, NoFit):
        return
    few = plan_engine(shape, Wish(device=device, max_num_seqs=low))
    assert isinstance(few, EnginePlan)
    assert few.kv_bytes >= many.kv_bytes
    assert few.kv_tokens >= many.kv_tokens


@given(shape=shapes(), device=devices, more=st.integers(0, 64 * 2**30))
def test_more_memory_never_holds_less(shape: ModelShape, device: Device, more: int) -> None:
    small = plan_engine(shape, Wish(device=device, share=0.9, max_num_seqs=64))
    if isinstance(small, NoFit):
        return
    larger = msgspec.structs.replace(device, memory_bytes=device.memory_bytes + more)
    large = plan_engine(shape, Wish(device=larger, share=0.9, max_num_seqs=64))
    assert isinstance(large, EnginePlan)
    assert large.kv_tokens >= small.kv_tokens or large.max_num_batched_tokens > small.max_num_batched_tokens


@given(shape=shapes(), device=st.sampled_from([one for one in DEVICES if one.memory_bytes < 40 * GIB]))
def test_every_way_out_that_is_named_works(shape: ModelShape, device: Device) -> None:
    found = plan_engine(shape, Wish(device=device))
    if isinstance(found, EnginePlan):
        return
    for way in found.would_fit:
        what, _, value = way.rpartition(" ")
        if what.endswith("--max-model-len"):
            wish = Wish(device=device, max_model_len=int(value))
        elif what.endswith("--gpus"):
            wish = Wish(device=device, gpus=int(value))
        elif what.endswith("--kv-cache-dtype"):
            wish = Wish(device=device, kv_dtype=value)
        elif what.endswith("--gpu"):
            wish = Wish(device=next(one for one in DEVICES if one.name == value))
        else:
            assert shape.weights.quantized is None
            continue
        assert isinstance(plan_engine(shape, wish), EnginePlan), way


@given(
    group=groups(64),
    tokens=st.integers(1, 100_000),
    more=st.integers(0, 100_000),
    block=st.sampled_from([16, 128]),
    step=st.integers(1, 16_384),
)
def test_blocks_of_a_request_grow_with_it(
    group: LayerGroup, tokens: int, more: int, block: int, step: int
) -> None:
    few, many = (group.sequence_blocks(count, block, step) for count in (tokens, tokens + more))
    assert 1 <= few <= many
    assert few <= -(-tokens // block) + 1
    if group.attention is Attention.FULL:
        assert few == -(-tokens // block)
