"""Messages on the wire: what goes in comes out, and nothing else gets in."""

import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import wire
from engine.core.errors import WireError

SPANS = [wire.Span(3, 0, 2), wire.Span(4, 2, 3)]


def tokens(*values):
    return np.array(values, dtype=np.int32)


def logprobs(*values):
    return np.array(values, dtype=np.float32)


def manifest():
    return wire.Manifest(
        policy_version=4,
        mover="shm",
        location="segment",
        num_bytes=8,
        tensors=[wire.TensorSpec("lm_head.weight", [2, 2], "bfloat16", 0, 8, "ab", True)],
        canaries=[wire.Canary(tokens(1, 2), logprobs(-0.5))],
    )


MESSAGES = [
    wire.Hello(protocol=1, role="worker", name="w0", life="a", pid=1, slots=4, policy_version=2),
    wire.Welcome(policy_version=3, life="b", window=8, silence_deadline_s=60.0),
    wire.Refused(reason="no"),
    wire.Ack(seq=7),
    wire.Closed(reason="done"),
    wire.Heartbeat(in_flight=2, tokens_generated=10, stage="generate"),
    wire.Encode(request=1, prompts=["1 + 1 ="], chat_template=True),
    wire.Encoded(request=1, token_ids=[tokens(1, 2), tokens()]),
    wire.Generate(
        key=wire.SampleKey(1, 2, 1), prompt_token_ids=tokens(5, 6), params=wire.SamplingParams(8, 1.0, 1.0, 2**63 - 1)
    ),
    wire.Abort(keys=[wire.SampleKey(1, 2)]),
    wire.SampleDone(
        key=wire.SampleKey(1, 2),
        token_ids=tokens(1, 2, 3),
        logprobs=logprobs(-0.5, -1.5, 0.0),
        spans=SPANS,
        text="2 µ",
        finish_reason="stop",
        generation_s=0.5,
    ),
    wire.SampleFailed(key=wire.SampleKey(1, 2), error="boom", tokens_lost=3),
    wire.Resumed(
        checkpoint="step-000004", policy_version=4, last_group_id=7, position=wire.Position(9, [3, 5], [11], 12, "ab")
    ),
    wire.WeightsReady(manifest=manifest(), stage_s=0.1),
    wire.StageWeights(manifest=manifest()),
    wire.Staged(policy_version=4, error="hash"),
    wire.ApplyWeights(policy_version=4, load=False),
    wire.Applied(policy_version=4, canary_max_nats=0.01),
    wire.WeightsPublished(policy_version=4),
    wire.Credit(groups=2),
    wire.TrainGroup(
        group_id=1,
        prompt_id="p",
        prompt_token_ids=tokens(5, 6),
        samples=[
            wire.TrainSample(0, tokens(1), logprobs(-1.0), [wire.Span(0, 0, 1)], 1.0, 0.5),
            wire.TrainSample(3, tokens(1, 2), logprobs(-1.0, -2.0), SPANS, 1.0, 0.5, logprobs(0.5, -1), logprobs(1, 0)),
        ],
        train_version=4,
        max_staleness=2,
        turn=2**40,
        position=wire.Position(2**40 + 1, [2**40 - 1]),
    ),
    wire.StepDone(policy_version=5, group_ids=[1], dropped_group_ids=[], metrics={"loss": 0.1}),
    wire.Finished(checkpoint="last"),
    wire.Stop(reason="signal", save=False),
]


def same(left, right):
    """Equal in value and, for arrays, in type."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def sent(frames):
    """Frames as a socket hands them over."""
    return [bytes(frame) for frame in frames]


def test_every_message_of_the_union_has_an_example_here():
    union = typing.get_args(typing.get_type_hints(wire.Envelope)["body"])
    assert {type(message) for message in MESSAGES} == set(union)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message):
    seq, decoded = wire.decode(sent(wire.encode(message, seq=9)))
    assert seq == 9
    assert same(message, decoded)


def test_a_sample_sends_nothing_for_token_values_that_it_does_not_have():
    sample = wire.TrainSample(0, tokens(1), logprobs(-1.0), [wire.Span(0, 0, 1)], 1.0, 0.5)
    prompt = tokens(5)
    group = wire.TrainGroup(
        group_id=1, prompt_id="p", prompt_token_ids=prompt, samples=[sample], train_version=0, max_staleness=0
    )
    frames = sent(wire.encode(group))
    assert len(frames) == 1 + 3  # the header, prompt, token ids and logprobs
    assert b"token_weights" not in frames[0]
    _, decoded = wire.decode(frames)
    assert isinstance(decoded, wire.TrainGroup)
    assert (decoded.samples[0].token_advantages.size, decoded.samples[0].token_weights.size) == (0, 0)


def test_arrays_are_sent_without_a_copy_and_arrive_as_read_only_views():
    ids = tokens(*range(1000))
    message = wire.Encoded(request=1, token_ids=[ids])
    frames = wire.encode(message)
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.int32), ids)
    _, decoded = wire.decode(sent(frames))
    assert isinstance(decoded, wire.Encoded)
    assert not decoded.token_ids[0].flags.writeable


def test_a_strided_array_arrives_whole():
    ids = tokens(*range(10))[::2]
    _, decoded = wire.decode(sent(wire.encode(wire.Encoded(request=1, token_ids=[ids]))))
    assert isinstance(decoded, wire.Encoded)
    assert decoded.token_ids[0].tolist() == [0, 2, 4, 6, 8]


def test_an_object_that_is_no_message_value_cannot_be_sent():
    with pytest.raises(WireError, match="cannot send a object"):
        wire.encode(wire.Refused(reason=object()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1garbage"],
        [msgspec.msgpack.encode([1, {"type": "Unknown"}])],
        [msgspec.msgpack.encode([1, {"type": "Ack", "seq": "seven"}])],
        [msgspec.msgpack.encode([1, {"type": "Ack"}])],
        [msgspec.msgpack.encode({"type": "Ack", "seq": 1})],
    ],
)
def test_bytes_that_are_no_message_are_a_wire_error(frames):
    with pytest.raises(WireError):
        wire.decode(frames)


def test_a_missing_array_frame_is_a_wire_error():
    frames = sent(wire.encode(wire.Encoded(request=1, token_ids=[tokens(1, 2)])))
    with pytest.raises(WireError):
        wire.decode(frames[:1])


def test_an_array_of_another_length_than_announced_is_a_wire_error():
    frames = sent(wire.encode(wire.Encoded(request=1, token_ids=[tokens(1, 2)])))
    with pytest.raises(WireError, match="must hold 2 values"):
        wire.decode([frames[0], frames[1] + b"\0\0\0\0"])


@pytest.mark.parametrize("array", [np.array([1, 2], dtype=np.int64), np.zeros((2, 2), dtype=np.int32)])
def test_an_array_of_another_type_or_shape_is_the_senders_error(array):
    with pytest.raises(WireError, match="one-dimensional <i4 or <f4"):
        wire.encode(wire.Encoded(request=1, token_ids=[array]))


def test_an_array_announced_as_another_type_is_a_wire_error():
    header = msgspec.msgpack.encode([1, {"type": "Encoded", "request": 1, "token_ids": [[1, "<i8", 1]]}])
    with pytest.raises(WireError, match="<i8"):
        wire.decode([header, b"\0" * 8])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_a_message_or_a_wire_error_and_nothing_else(data):
    message = data.draw(st.sampled_from(MESSAGES))
    frames = sent(wire.encode(message, seq=1))
    which = data.draw(st.integers(0, len(frames) - 1))
    damaged = bytearray(frames[which])
    if damaged:
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    frames[which] = bytes(damaged[:cut]) if data.draw(st.booleans()) else bytes(damaged)
    try:
        _, decoded = wire.decode(frames)
    except WireError:
        return
    assert isinstance(decoded, wire.Message)


@settings(max_examples=300, deadline=None)
@given(frames=st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes_never_raise_anything_but_a_wire_error(frames):
    try:
        wire.decode(frames)
    except WireError:
        return


RECORD = wire.CheckpointRecord(
    wire.Milestone(4, 7, wire.Position(9, [3, 5], [11], 12, "ab")),
    wire.Fingerprint("torch", "LlamaForCausalLM", "bfloat16", 1, {"model.norm.weight": [64]}),
    {"config.json": wire.FileSum(10, "ab")},
)


def test_a_checkpoints_record_comes_out_as_it_went_in():
    assert wire.decode_record(wire.encode_record(RECORD)) == RECORD


@pytest.mark.parametrize("place", range(0, len(wire.encode_record(RECORD)), 7))
def test_a_record_with_one_changed_byte_is_refused(place):
    content = bytearray(wire.encode_record(RECORD))
    content[place] ^= 4
    with pytest.raises(WireError):
        wire.decode_record(bytes(content))


def test_a_group_of_an_engine_that_knows_no_positions_is_still_understood():
    plain = wire.encode(next(message for message in MESSAGES if isinstance(message, wire.TrainGroup)))
    header = msgspec.msgpack.decode(bytes(plain[0]))
    assert header[1]["type"] == "TrainGroup"
    del header[1]["turn"], header[1]["position"]
    _, group = wire.decode([msgspec.msgpack.encode(header), *sent(plain[1:])])
    assert (group.turn, group.position) == (-1, None)
