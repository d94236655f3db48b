"""A rank that looks for devices that are not its task's: by their nodes, and by their use."""

import json
import os

if os.environ["RANK"] == "1":
    import torch

    folder = os.environ["SIM_HOME"]
    nodes = sorted(name for name in os.listdir(folder) if name.startswith("node"))
    torch.ones(1, device="sim:0").cpu()  # of the other rank of its own task
    try:
        torch.ones(1, device="sim:2").cpu()
        beyond = "used"
    except RuntimeError:
        beyond = "refused"
    print(json.dumps({"nodes": nodes, "count": str(torch.sim.device_count()), "beyond": beyond}))
