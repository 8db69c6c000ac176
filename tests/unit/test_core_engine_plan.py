"""Plans for engines: the sums, what is recommended, and what is refused with a way out."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.engine_plan import EnginePlan, NoFit, Wish, WishError, percentile_95, plan_engine
from hybridsched.core.gpus import GIB, Device, find_device
from hybridsched.core.model_shape import Attention, LayerGroup, ModelShape, Weights, kv_pool

change = msgspec.structs.replace


def full(layers: int = 32, kv_heads: int = 8, size: int = 128) -> LayerGroup:
    return LayerGroup(
        attention=Attention.FULL, layers=layers, kv_heads=kv_heads, key_size=size, value_size=size
    )


def sliding(layers: int, window: int, kv_heads: int = 8, size: int = 128) -> LayerGroup:
    return LayerGroup(
        attention=Attention.SLIDING,
        layers=layers,
        kv_heads=kv_heads,
        key_size=size,
        value_size=size,
        window_tokens=window,
    )


def weights(gib: float) -> Weights:
    return Weights(divided_bytes=int(gib * GIB), kv_divided_bytes=0, copied_bytes=0, tensors=291)


LLAMA_8B = ModelShape(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    hidden_size=4096,
    mlp_width=14336,
    vocab_size=128256,
    attention_heads=32,
    groups=(full(),),
    own_length_tokens=8192,
    weights=weights(14.96),
)
LLAMA_70B = change(
    LLAMA_8B,
    hidden_size=8192,
    mlp_width=28672,
    attention_heads=64,
    groups=(full(80),),
    weights=weights(131.4),
)
A100 = find_device("a100-80gb")
H100 = find_device("h100-80gb")


def plan(shape: ModelShape, wish: Wish) -> EnginePlan:
    found = plan_engine(shape, wish)
    assert isinstance(found, EnginePlan), found
    return found


def refusal(shape: ModelShape, wish: Wish) -> NoFit:
    found = plan_engine(shape, wish)
    assert isinstance(found, NoFit), found
    return found


def test_published_log_of_an_h100() -> None:
    """vLLM pull request 10511: Llama-3-8B, 79.22 GiB, utilization 0.90: 53.29 GiB for the KV cache."""
    device = change(H100, memory_bytes=int(79.22 * GIB))
    found = plan(LLAMA_8B, Wish(device=device, share=0.9, max_num_seqs=256))
    assert found.kv_bytes == pytest.approx(53.29 * GIB, rel=0.05)
    assert found.kv_tokens == pytest.approx(53.29 * GIB / (128 * 1024), rel=0.05)


def test_sums_are_exact() -> None:
    found = plan(LLAMA_8B, Wish(device=A100))
    assert found.memory_bytes is not None
    assert found.gpu_memory_utilization is not None
    taken = found.weights_bytes + found.activation_bytes + found.overhead_bytes + found.kv_bytes
    assert taken == int(found.memory_bytes * found.gpu_memory_utilization)
    assert found.kv_bytes_per_token == 32 * 8 * (128 + 128) * 2
    assert found.kv_tokens == found.kv_bytes // (found.kv_bytes_per_token * 16) * 16
    assert found.max_model_len % 16 == 0
    assert found.full_length_requests == found.kv_bytes / (8192 * found.kv_bytes_per_token)


def test_a_trace_sets_length_and_requests() -> None:
    lengths = tuple(range(1, 2001))
    assert percentile_95(lengths) == 1900
    found = plan(LLAMA_8B, Wish(device=A100, lengths=lengths))
    assert found.max_model_len == 2304  # 1900 x 1.2 = 2280, rounded up to 256
    short = plan(LLAMA_8B, Wish(device=find_device("3g.20gb@a100-40gb"), lengths=lengths))
    room = short.kv_bytes // (63 * 16 * short.kv_bytes_per_token)  # the mean of 1,001 tokens takes 63 blocks
    assert short.max_num_seqs <= room < 256
    assert "mean" in next(step.why for step in short.steps if step.name == "max-num-seqs")


def test_a_length_does_not_pass_the_models_own_and_longer_requests_are_named() -> None:
    lengths = (100,) * 8 + (9000, 9000)
    found = plan(LLAMA_8B, Wish(device=A100, lengths=lengths))
    assert found.max_model_len == 8192
    why = next(step.why for step in found.steps if step.name == "max-model-len")
    assert "not past the model's own 8,192" in why
    assert "2 of 10 requests" in why


def test_too_large_for_one_gpu_and_what_would_fit() -> None:
    found = refusal(LLAMA_70B, Wish(device=H100))
    assert "131.40 GiB" in found.why
    assert found.would_fit == (
        "weights quantized to fp8",
        "tensor parallelism: --gpus 2",
        "a larger device: --gpu b200",
    )
    parallel = plan(LLAMA_70B, Wish(device=H100, gpus=8))
    assert parallel.tensor_parallel == 2
    assert parallel.weights_bytes == pytest.approx(131.4 / 2 * GIB, rel=0.001)
    assert parallel.kv_bytes_per_token == 80 * 4 * 256 * 2


def test_each_way_out_is_one() -> None:
    small = find_device("1g.18gb@h200")
    found = refusal(change(LLAMA_8B, weights=weights(12.8)), Wish(device=small))
    kinds = [way.partition(":")[0] for way in found.would_fit]
    assert kinds == [
        "a shorter length",
        "a KV cache of half the size",
        "weights quantized to fp8",
        "a larger device",
    ]
    shape = change(LLAMA_8B, weights=weights(12.8))
    length = int(found.would_fit[0].split()[-1])
    assert plan(shape, Wish(device=small, max_model_len=length)).max_model_len == length
    refusal(shape, Wish(device=small, max_model_len=length + 256))
    plan(shape, Wish(device=small, kv_dtype="fp8"))
    plan(shape, Wish(device=find_device(found.would_fit[-1].split()[-1])))


def test_a_slice_names_a_bigger_slice_of_its_gpu() -> None:
    found = refusal(LLAMA_8B, Wish(device=find_device("1g.10gb@a100-80gb")))
    assert found.would_fit == ("a larger device: --gpu 1g.20gb@a100-80gb",)


def test_a_share_that_was_given_too_small_is_the_first_way_out() -> None:
    found = refusal(LLAMA_8B, Wish(device=A100, share=0.1))
    assert found.would_fit[0] == "a larger share of the memory: leave --gpu-memory-utilization out"
    plan(LLAMA_8B, Wish(device=A100))
    # Where even the whole memory is too small the share is not to blame.
    small = refusal(LLAMA_8B, Wish(device=find_device("1g.10gb@a100-80gb"), share=0.5))
    assert not any("share" in way for way in small.would_fit)


def test_nothing_would_fit() -> None:
    giant = change(LLAMA_70B, weights=change(weights(4000), quantized="fp8"))
    assert refusal(giant, Wish(device=H100)).would_fit == ()


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(device=find_device("3g.40gb@a100-80gb"), gpus=2), "a process sees one slice"),
        (Wish(device=A100, max_model_len=8193), "takes 1 to 8192"),
        (Wish(device=A100, kv_dtype="int3"), "'int3' is no type"),
        (Wish(device=A100, share=1.5), "at most 1"),
        (Wish(device=A100, gpus=0), "1 or more"),
        (Wish(device=A100, max_num_seqs=0), "1 or more"),
        (Wish(device=None), "--kv-gib"),
        (Wish(device=None, kv_space_bytes=GIB, gpus=2), "on the CPU give 1"),
    ],
)
def test_wishes_that_cannot_be(wish: Wish, says: str) -> None:
    with pytest.raises(WishError, match=says):
        plan_engine(LLAMA_8B, wish)


def test_heads_decide_how_many_gpus() -> None:
    odd = change(LLAMA_70B, attention_heads=40, groups=(full(80, kv_heads=10),))
    assert [count for count in (1, 2, 4, 8) if odd.divides(count)] == [1, 2]
    few = change(LLAMA_70B, groups=(full(80, kv_heads=2),))
    assert few.divides(8)
    assert full(80, kv_heads=2).token_bytes(2, 8) == 256 * 2  # each GPU has one head


def test_weights_by_gpu() -> None:
    spread = Weights(divided_bytes=800, kv_divided_bytes=100, copied_bytes=7, tensors=3)
    assert spread.gpu_bytes(1, 2) == spread.total_bytes == 907
    assert spread.gpu_bytes(4, 2) == 200 + 50 + 7


def test_latent_attention_keeps_one_vector_on_every_gpu() -> None:
    latent = LayerGroup(attention=Attention.LATENT, layers=61, kv_heads=1, key_size=512 + 64, value_size=0)
    assert latent.token_bytes(2, 1) == latent.token_bytes(2, 8) == 576 * 2


def test_windows_keep_no_more_than_themselves() -> None:
    """As vLLM's design of its hybrid KV cache has it: 10 full and 20 sliding layers make 3 groups of 10."""
    shape = change(LLAMA_8B, groups=(full(10), sliding(20, window=1024)), own_length_tokens=131072)
    pool = kv_pool(shape, 2, 1, 16)
    assert pool.block_bytes == 10 * 4096 * 16
    assert [count for _, count in pool.parts] == [1, 2]
    long = pool.sequence_blocks(131072, in_flight_tokens=4096)
    kept = -(-(1024 - 1 + 4096) // 16) + 1
    assert long == 131072 // 16 + 2 * kept
    assert pool.sequence_bytes(160, in_flight_tokens=4096) == (10 + 2 * 11) * pool.block_bytes
    assert pool.capacity_tokens(pool.block_bytes * long * 3 + 5, 131072, 4096) == 3 * 131072


def test_groups_of_nearly_one_size_are_padded() -> None:
    pool = kv_pool(change(LLAMA_8B, groups=(full(18), sliding(20, window=128))), 2, 1, 16)
    assert pool.block_bytes == 20 * 4096 * 16
    assert [count for _, count in pool.parts] == [1, 1]


def test_the_cpu_has_the_kv_cache_that_it_is_given() -> None:
    found = plan(LLAMA_8B, Wish(device=None, kv_space_bytes=4 * GIB))
    assert (found.kv_bytes, found.gpu_memory_utilization, found.block_tokens) == (4 * GIB, None, 128)
    assert found.kv_tokens == 4 * GIB // (128 * 131072) * 128


def test_windows_on_the_cpu_spare_nothing() -> None:
    """vLLM 0.32 with 4 layers of a window of 256 and 2 without, 1 GiB: 2,730 blocks, 349,440 tokens."""
    shape = change(
        LLAMA_8B,
        dtype="float32",
        groups=(full(2, kv_heads=2, size=32), sliding(4, window=256, kv_heads=2, size=32)),
        own_length_tokens=4096,
    )
    found = plan(shape, Wish(device=None, kv_space_bytes=GIB))
    assert found.kv_tokens == 349_440
    assert found.full_length_requests == pytest.approx(85.3, abs=0.1)


def test_more_requests_than_tokens_in_a_step_raise_the_step() -> None:
    found = plan(LLAMA_8B, Wish(device=A100, max_num_seqs=4000))
    assert found.max_num_batched_tokens == 4000


def test_plans_round_trip_as_json() -> None:
    found = plan(LLAMA_8B, Wish(device=A100))
    assert msgspec.json.decode(msgspec.json.encode(found), type=EnginePlan) == found


def test_small_devices_keep_a_larger_part_for_the_context() -> None:
    def share(device: Device) -> float:
        tiny = change(LLAMA_8B, weights=weights(0.1), vocab_size=512)
        found = plan(tiny, Wish(device=device))
        assert found.gpu_memory_utilization is not None
        return found.gpu_memory_utilization

    assert share(find_device("1g.5gb@a100-40gb")) == 0.84
    assert share(find_device("1g.10gb@a100-80gb")) == 0.91
    assert share(A100) == 0.95
