"""A training script as people have them: it saves a checkpoint only when a signal tells it to."""

import json
import os
import signal
import sys
import time

asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))

steps, how = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "obeys"
step = 0
if os.path.exists("saved.json"):
    with open("saved.json") as file:
        step = json.load(file)["step"]
print("begins at", step, "restarts", os.environ["ROUNDHOUSE_RESTARTS"], flush=True)
while step < steps:
    step += 1
    time.sleep(0.01)
    with open(os.environ["ROUNDHOUSE_METRICS"], "a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    if asked:
        with open(os.environ["ROUNDHOUSE_NOTICE"]) as file:
            told = json.load(file)
        print("told", told["why"], round(told["seconds"]), told["until"] > "2020", flush=True)
        asked.clear()
        if how == "obeys":
            with open("saved.json", "w") as file:
                json.dump({"step": step}, file)
            print("saved at", step, flush=True)
            sys.exit(85)
print("done at", step)
