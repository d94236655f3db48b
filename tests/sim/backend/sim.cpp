// A torch backend whose devices are simulated: `torch.device("sim", 0)`.
//
// One unit of compilation: torch's headers take most of the time, so they are read once.
// Each part holds one idea; a part uses only the parts above it.

#include "settings.h"   // what the environment says
#include "fork_rule.h"  // first use, and forks after it
#include "memory.h"     // addresses that the host cannot touch, and their twins
#include "budget.h"     // bytes of each device, common to all processes of a host
#include "streams.h"    // queues of work that run early, late or by dice
#include "allocator.h"  // segments and blocks, reused in the order of their stream
#include "pinned.h"     // host memory that copies may reach while the host goes on
#include "generator.h"  // random numbers of a device
#include "aliases.h"    // CPU tensors over a device's memory
#include "copies.h"     // between host and devices
#include "fallback.h"   // every operation, by the CPU's kernels
#include "kernels.h"    // the operations that the fallback cannot take
#include "recurrent.h"  // LSTM and GRU, computed as the CPU does
#include "autocast.h"   // the precision of operations
#include "hooks.h"      // what torch asks of an accelerator
#include "operators.h"  // what the Python module asks
