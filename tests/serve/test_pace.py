"""How long the next piece of a prompt is, by how long the last one took."""

from __future__ import annotations

from skimkv.serve.pace import FIRST_PIECE, SHORTEST_PIECE, Meter, PieceLength


def test_pieces_follow_the_last_one() -> None:
    pace = PieceLength()
    assert pace.within(0.2) == FIRST_PIECE
    pace.note(64, 0.02)  # 3,200 tokens a second: 640 in 0.2 s, but at most four times as many as ever before
    assert pace.within(0.2) == 256
    pace.note(256, 0.1)  # 512 in 0.2 s
    assert pace.within(0.2) == 512
    pace.note(512, 0.4)  # later tokens take longer: 256
    assert (pace.within(0.2), pace.within(0.1)) == (256, 128)
    pace.note(3, 1.0)  # too short to tell
    assert pace.within(0.16) == 192  # whole multiples of 64
    pace.note(64, 0.3)  # 42 tokens: fewer than 64 are multiples of the shortest piece
    assert pace.within(0.2) == 32
    pace.note(32, 30.0)
    assert pace.within(0.2) == SHORTEST_PIECE


def test_a_meter_is_of_the_last_ten_seconds() -> None:
    meter = Meter()
    assert meter.per_second() == 0
    for _ in range(5):
        meter.add(8)
    assert meter.per_second() == 4
    meter._counted.appendleft((-1.0, 1000))  # long ago
    assert meter.per_second() == 4
