"""What a program written by a model may try against the sandbox, the score and the next program."""

from pathlib import Path

from tests.chaos.attacks import Tried, attack
from tests.sandbox.arena import LIMITS, RIGHT, code_gen, isolated, verdict
from tests.sandbox.hostile import (
    ANSWERS,
    INHERITED,
    REACHING_OUT,
    SIGNALLING,
    UNSCORED,
    changing,
    looking,
    refused,
)

_LAYERS = (["namespaces", "landlock", "seccomp"], ["landlock", "seccomp"])


@attack("code_gen: programs and answers that want out of the score")
def out_of_the_score(folder: Path) -> Tried:
    """Each is scored 0, and the right program after it 1."""
    result = Tried()
    with code_gen() as client:
        for name, text in {**{name: f"```\n{code}\n```" for name, code in UNSCORED.items()}, **ANSWERS}.items():
            verdicts = [verdict(client, text), verdict(client, RIGHT)]
            rewards = [it["reward"] for it in verdicts]
            result.count(name, None if rewards == [0.0, 1.0] else f"{verdicts}"[:1000])
    return result


@attack("sandbox: signals to other processes, and what users' processes share", short=True)
def out_of_the_sandbox(folder: Path) -> Tried:
    """Each is refused, whichever layers there are."""
    result = Tried()
    victim = folder / "victim"
    victim.write_text("as it was")
    attempts = {**SIGNALLING, **REACHING_OUT}
    for layers in _LAYERS:
        with isolated(folder, layers) as process:
            outcome = process.call(refused(attempts, victim), LIMITS)
            worked = attempts if outcome.end != "done" else outcome.value
            for name in attempts:
                result.count(f"{name} ({' '.join(layers)})", "it worked" if name in worked else None)
    return result


@attack("sandbox: attributes of a process that the next program would inherit")
def into_the_next_program(folder: Path) -> Tried:
    """Whatever one program changes, the next finds as it was."""
    result = Tried()
    for layers in _LAYERS:
        with isolated(folder, layers) as process:
            for name in INHERITED:
                before = process.call(looking(name), LIMITS, stdin="input")
                process.call(changing(name), LIMITS, stdin="input")
                after = process.call(looking(name), LIMITS, stdin="input")
                is_same = (before.end, before.value) == (after.end, after.value) and before.end == "done"
                result.count(
                    f"{name} ({' '.join(layers)})", None if is_same else f"{before.value!r}, then {after.value!r}"
                )
    return result
