"""A script that knows nothing of Roundhouse: it counts, and goes on from its own checkpoint.

python count.py STEPS SECONDS_OF_A_STEP [waits]        waits at its end for a file `end`
"""

import hashlib
import json
import os
import sys
import time

steps, nap_s = int(sys.argv[1]), float(sys.argv[2])
state = {"step": 0, "sum": "0"}
if os.path.exists("state.json"):
    with open("state.json") as file:
        state = json.load(file)
print("begins after", state["step"], "restarts", os.environ["ROUNDHOUSE_RESTARTS"])
while state["step"] < steps:
    state["step"] += 1
    text = f"{state['sum']} {state['step']}".encode()
    state["sum"] = hashlib.sha256(text).hexdigest()
    time.sleep(nap_s)
    with open("state.tmp", "w") as file:
        json.dump(state, file)
    os.replace("state.tmp", "state.json")
    with open(os.environ["ROUNDHOUSE_METRICS"], "a") as file:
        file.write(json.dumps({"step": state["step"]}) + "\n")
while "waits" in sys.argv and not os.path.exists("end"):
    time.sleep(0.01)
print("sum", state["sum"])
with open("result.txt", "w") as file:
    file.write(state["sum"])
