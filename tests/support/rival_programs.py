"""Stand-ins for the programs of `bench token --against`: little scripts that take their arguments and print alike.

Repetition i takes (100 + i) ms by what they print, and no time. They print one line, and two more each time they are
continued after a stop, so that what is counted does not depend on the speed of the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

COMMON = """#!{python} -SE
import json, os, signal, sys, time

MORE = 8  # repetitions after all turns
arguments, options = sys.argv[1:], {{}}
while arguments:
    name = arguments.pop(0)
    options[name] = None if name in ("--progress", "--sparq") else arguments.pop(0)

def check(**expected):
    rest = dict(options)
    for name, value in expected.items():
        if rest.pop(name if name.startswith("--") else "-" + name, "missing") != value:
            sys.exit(f"error: invalid parameter for argument: {{name}}")
    return rest

continues = 0

def count(*_):
    global continues
    continues += 1

signal.signal(signal.SIGCONT, count)
repetitions = int(options["-r"])
turns = (repetitions - 2 - MORE) // 2

held_back = ""

def print_between(text, lines):
    global held_back
    held_back += text
    if lines >= {ahead}:  # the first ones at once, so that none can be missing when the program is stopped
        os.write(1, held_back.encode())
        held_back = ""
        while lines >= {ahead} + 2 * continues and continues <= turns:
            time.sleep(0.001)
"""

LLAMA = """
rest = check(m={model!r}, ngl="0", p="0", n="4", o="json", **{{"--progress": None}})
assert rest.keys() == {{"-t", "-r", "-d", "-fa"}} and rest["-fa"] in "01", rest
depth, flash = int(rest["-d"]), int(rest["-fa"])
print("[", flush=True)
ns = []
for i in range(repetitions):
    of = f"{{i + 1}}/{{repetitions}}"
    start = "llama-bench: benchmark 1/1: "
    print_between(f"{{start}}depth run {{of}} (cached)\\n{{start}}generation run {{of}}\\n", i + 1)
    ns.append(4 * (100 + i + 50 * flash) * 10**6)
run = {{"n_threads": int(rest["-t"]), "n_gen": 4, "n_depth": depth, "flash_attn": flash, "samples_ns": ns}}
print(json.dumps(run, indent=4))
print("]")
"""

LLAMA_PROMPT = """
turns = (repetitions - 4) // 2
rest = check(m={model!r}, ngl="0", n="0", o="json", **{{"--progress": None}})
assert rest.keys() == {{"-t", "-r", "-p", "-fa"}} and rest["-fa"] in "01", rest
flash = int(rest["-fa"])
print("[", flush=True)
ns = []
for i in range(repetitions):
    print_between(f"llama-bench: benchmark 1/1: prompt run {{i + 1}}/{{repetitions}}\\n", i + 1)
    ns.append((100 + i + 50 * flash) * 10**6)
print(json.dumps({{"n_prompt": int(rest["-p"]), "samples_ns": ns}}, indent=4))
print("]")
"""

FORK = """
rest = check(m={model!r}, ngl="0", n="0", b="1", ub="1", f="skimkv")
sparq = "--sparq" in rest
if sparq:
    check(k1="32", k2="128", **{{"--sparq": None}})
print("Log Filename: skimkv\\n")
print(f"Extended prompt length by {{rest['-p']}} (new prompt length = {{rest['-p']}}) in 0.1 seconds", flush=True)
for i in range(repetitions):
    seconds = (100 + i - 50 * sparq) / 1000
    prompt = rest["-p"]
    print_between(f"    Repeat {{i}}, n_prompt = {{prompt}}, token_count = 7: {{seconds:6.9f}} seconds\\n", i + 1)
"""


def write_program(path: Path, model: Path, kind: str, ahead: int = 1) -> Path:
    """Write the stand-in of a kind of rivals.KINDS for this model, or of one that reads "prompts", and return its path.

    ahead: the lines that it prints before it waits for the first time.
    """
    text = (COMMON + {"llama.cpp": LLAMA, "prompts": LLAMA_PROMPT, "fork": FORK}[kind]).format(
        python=sys.executable, model=str(model), ahead=ahead
    )
    path.write_text(text)
    path.chmod(0o755)
    return path
