"""Random traffic on a world."""

from __future__ import annotations

from tests.sim.setup import setup
from tests.sim.world import VOCAB, World, beam, replace_request


def run(world: World, *, num_steps: int, beams: bool = True) -> None:
    """Plain requests, salts, aborts and beam searches."""
    rng = world.random
    for _ in range(num_steps):
        if rng.random() < 0.35 and len(world.scheduler.queue) < 12:
            wide = beams and world.setup.allows_beams and rng.random() < 0.1
            world.add(world.request(beam=beam(rng.randint(2, 4))) if wide else world.request())
        if rng.random() < 0.05:
            abort_one(world)
        world.step()
    world.drain()
    world.verify()


def run_rich(world: World, *, num_steps: int, restart_every: int = 0) -> None:
    """Everything a request can ask for, pins that come and go, and a process that dies now and then."""
    rng = world.random
    for step in range(1, num_steps + 1):
        busy = step // 40 % 4 != 3  # every fourth spell is a quiet one
        if rng.random() < (0.35 if busy else 0.03) and len(world.scheduler.queue) < 12:
            wide = world.setup.allows_beams and rng.random() < 0.06
            world.add(world.rich_request(beam=beam(rng.randint(2, 3)), pin="") if wide else world.rich_request())
        if rng.random() < 0.05:
            abort_one(world)
        if rng.random() < 0.03:
            world.unpin_one()
        if restart_every and step % restart_every == 0:
            world.restart()
        world.step()
    world.drain()
    world.verify()
    verify_beams(world, most=2)


def prefixes(world: World, count: int, length: int = 16) -> list[list[int]]:
    return [[world.random.randrange(1, VOCAB) for _ in range(length)] for _ in range(count)]


def ask_in_turn(world: World, known: list[list[int]], *, rounds: int) -> None:
    """One short request after the other, each with one of the prefixes: what fits nowhere is asked for again."""
    for prefix in known * rounds:
        tail = [world.random.randrange(1, VOCAB) for _ in range(3)]
        world.add(world.request(prompt=prefix + tail, max_tokens=2, cache_salt="", stop_ids=()))
        world.drain()


def abort_one(world: World) -> None:
    going = [told.request.id for told in world.told.values() if told.end is None]
    if going:
        world.abort(world.random.choice(going))


def verify_beams(world: World, *, most: int = 100) -> int:
    """The last beam searches brought what each brings alone. -> how many were compared"""
    ended = [told for told in world.told.values() if told.end is not None and told.end.beams]
    for told in ended[-most:]:
        assert told.end is not None and told.end.beams is not None
        solo = World(setup(groups=world.setup.groups, num_blocks=300), seed=1)
        # The limit may have come from the pool.
        limit = max(len(beam.tokens) for beam in told.end.beams)
        if told.end.finish != "length":
            limit = told.limit - len(told.request.prompt)
        again = solo.add(replace_request(told.request, max_tokens=limit))
        solo.drain()
        assert again.end is not None and again.end.beams is not None
        alone, together = ([beam.tokens for beam in end.beams or ()] for end in (again.end, told.end))
        assert alone == together, f"request {told.request.id}: beams {together} instead of {alone}"
    return len(ended[-most:])
