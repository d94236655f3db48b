"""Programs that are paused, stored and restored at random moments, each with a result to compare.

Every program prints the lines 0, 1, 2, ... and then a line that begins with "sum", which depends on
all that it did.  None of them writes anything down to begin again from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixProgram:
    """A program; `begins_again` is a part of the reason why it cannot go on elsewhere, if so."""

    name: str
    source: str
    begins_again: str = ""
    needs: tuple[str, ...] = ()  # packages of its environment
    within_s: float = 1.0  # of a start its moment lies


_PLAIN = """
import hashlib, random, time
random.seed(7); digest = hashlib.sha256()
for n in range(120):
    digest.update(random.randbytes(100)); time.sleep(0.008); print(n)
print("sum", digest.hexdigest())
"""

_TORN = """
import sys, time
for n in range(60):
    for part in (str(n // 10), str(n % 10), " of", " 60", "\\n"):
        if part != "0" or n >= 10: sys.stdout.write(part)
        sys.stdout.flush(); time.sleep(0.003)
print("sum", n)
"""

_CHILDREN = """
import hashlib, os, subprocess, sys, tempfile, time
zombie = os.fork()
if not zombie: os._exit(3)
gone = tempfile.mkdtemp(dir="."); os.chdir(gone); os.rmdir("../" + gone)
held = [open("/proc/self/status"), os.open("/proc/self", os.O_RDONLY), os.pidfd_open(os.getpid())]
digest = hashlib.sha256()
for n in range(60):
    child = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {n % 7}"], {})
    digest.update(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]))
    time.sleep(0.01); print(n)
status = os.waitstatus_to_exitcode(os.waitpid(zombie, 0)[1])
print("sum", digest.hexdigest(), status, b"Name" in os.pread(held[0].fileno(), 100, 0))
"""

_TRAINS = """
import hashlib, torch
torch.manual_seed(1); torch.set_num_threads({threads})
{data}
model = torch.nn.Sequential({layers})
optimizer = torch.optim.AdamW(model.parameters())
for n in range(60):
    x, y = next(batches)
    loss = torch.nn.functional.mse_loss(model(x + 0.01 * torch.randn_like(x)), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(n)
digest = hashlib.sha256()
for part in model.parameters(): digest.update(part.detach().numpy().tobytes())
print("sum", loss.item(), digest.hexdigest())
"""
_RANDOM = """
def random_batches():
    while True: yield torch.randn({shape}), torch.randn(64, 8)
batches = random_batches()"""
_LOADER = """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64 * 60
    def __getitem__(self, n): return torch.full((32,), n / 1000), torch.full((8,), n / 2000)
batches = iter(torch.utils.data.DataLoader(Rows(), 64, shuffle=True, num_workers=2))"""
_MLP = "torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)"
_CONVNET = "torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1568, 8)"

_SHARED_TENSORS = """
import hashlib, time, torch, torch.multiprocessing as mp
def work(shared, asked, given):
    while (n := asked.get()) is not None:
        shared.mul_(0.5).add_(n); given.put(float(shared.sum()))
if __name__ == "__main__":
    torch.set_num_threads(1)
    shared = torch.zeros(1000).share_memory_(); asked, given = mp.Queue(), mp.Queue()
    worker = mp.Process(target=work, args=(shared, asked, given)); worker.start(); total = 0.0
    for n in range(80):
        asked.put(n); total += given.get(); time.sleep(0.005); print(n)
    asked.put(None); worker.join()
    print("sum", total, hashlib.sha256(shared.numpy().tobytes()).hexdigest())
"""

_POOL = """
import hashlib, time, multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
def square(n): return n * n
value, turn = mp.Value("i", 0), mp.Semaphore(1)
shared = shared_memory.SharedMemory(create=True, size=100)
with ProcessPoolExecutor(2) as pool:
    for n in range(80):
        with turn, value.get_lock(): value.value += pool.submit(square, n).result()
        shared.buf[n] = value.value % 251; time.sleep(0.005); print(n)
print("sum", value.value, sum(shared.buf)); shared.close(); shared.unlink()
"""

_NUMPY_POOL = """
import hashlib, multiprocessing as mp, numpy as np
def walk(seed):
    steps = np.random.default_rng(seed).standard_normal((200, 200))
    return np.linalg.eigvals(steps @ steps.T).real.sum()
if __name__ == "__main__":
    with mp.get_context("spawn").Pool(2) as pool:
        found = []
        for n, total in enumerate(pool.imap(walk, range(40))): found.append(float(total)); print(n)
    print("sum", hashlib.sha256(repr(found).encode()).hexdigest())
"""

_FILES = """
import fcntl, hashlib, mmap, os, tempfile, time
log, gone = open("log.txt", "a"), tempfile.TemporaryFile(dir=".")
beside = open("/tmp/beside", "w+"); fcntl.flock(beside, fcntl.LOCK_EX)
with open("mapped", "wb") as file: file.truncate(1 << 20)
file = open("mapped", "r+b"); mapped = mmap.mmap(file.fileno(), 1 << 20)
fcntl.lockf(file, fcntl.LOCK_EX, 100)
for n in range(100):
    log.write(f"{n}\\n"); log.flush(); gone.write(b"x"); beside.write(str(n))
    mapped[n * 4096 : n * 4096 + 4] = n.to_bytes(4, "big"); time.sleep(0.008); print(n)
mapped.flush(); beside.flush(); gone.seek(0)
parts = [open("log.txt").read(), open("/tmp/beside").read(), gone.read(), bytes(mapped)]
print("sum", hashlib.sha256(repr(parts).encode()).hexdigest())
"""

_BIG_FILE = """
import hashlib, random, time
random.seed(3); piece = random.randbytes(1 << 20)
with open("big", "wb", buffering=0) as file:
    for n in range(100):
        file.write(piece[n:] + piece[:n]); time.sleep(0.005); print(n)
digest = hashlib.sha256()
with open("big", "rb") as file:
    while part := file.read(1 << 20): digest.update(part)
print("sum", digest.hexdigest())
"""

_SQLITE_WAL = """
import sqlite3, time
database = sqlite3.connect("kept.db"); database.execute("pragma journal_mode=wal")
database.execute("create table if not exists t (n)"); database.execute("delete from t")
for n in range(80):
    database.execute("insert into t values (?)", (n,))
    if n % 3: database.commit()
    time.sleep(0.008); print(n)
database.commit()
print("sum", *database.execute("select count(*), sum(n), max(n) from t").fetchone())
"""
_SQLITE = _SQLITE_WAL.replace("wal", "delete")

_PIPES = """
import subprocess, time
adds = "import sys\\ntotal = 0\\nfor line in sys.stdin:\\n total += int(line); print(total)"
child = subprocess.Popen(["python", "-c", adds], stdin=-1, stdout=-1, text=True, bufsize=1)
for n in range(100):
    child.stdin.write(f"{n}\\n"); total = int(child.stdout.readline()); time.sleep(0.008); print(n)
child.stdin.close(); print("sum", total, child.wait())
"""

_SOCKETS = """
import pathlib, socket, time
pathlib.Path("unix").unlink(missing_ok=True)
unix = socket.socket(socket.AF_UNIX); unix.bind("unix"); unix.listen()
one = socket.socket(socket.AF_UNIX); one.connect("unix"); other, _ = unix.accept()
left, right = socket.socketpair()
listening = socket.create_server(("127.0.0.1", 0)); closed = []
client = socket.create_connection(listening.getsockname()); server, _ = listening.accept()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0))
for n in range(100):
    one.send(b"a"); left.send(b"b"); client.send(b"c" * 100)
    udp.sendto(b"d", udp.getsockname()); time.sleep(0.004); udp.recv(10)
    if n % 10 == 0:
        ends = socket.create_connection(listening.getsockname()); time.sleep(0.002)
        ends.send(b"e" * 100); ends.shutdown(socket.SHUT_WR)
        closed += [ends, listening.accept()[0]]
    time.sleep(0.004); print(n)
got = [len(end.recv(100, socket.MSG_WAITALL)) for end in (other, right, *closed[1::2])]
print("sum", got, len(server.recv(10_000, socket.MSG_WAITALL)))
"""

# Its sender fills the window of each connection, and closes it with most of the data under way.
_POURS = """
import hashlib, os, socket, time
listening = socket.create_server(("127.0.0.1", 0)); digest = hashlib.sha256()
for n in range(40):
    if not os.fork():
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(b"%3d" % n * 300_000)
        os._exit(0)
    server, _ = listening.accept()
    while part := server.recv(50_000): digest.update(part); time.sleep(0.001)
    server.close(); os.wait(); print(n)
print("sum", digest.hexdigest())
"""

_UNREAD = """
import socket, time
udp = socket.socket(type=socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0))
udp.sendto(b"a", udp.getsockname())
for n in range(250): time.sleep(0.01); print(n)
print("sum", udp.recv(10))
"""

_INTERFACES = """
import hashlib, socket, time
route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); route.bind((0, 0))
digest = hashlib.sha256()
for n in range(60):
    digest.update(bytes([(1, "lo") in socket.if_nameindex()]))
    route.send((20).to_bytes(4, "little") + bytes((18, 0, 1, 3)) + bytes(12))
    told = [b""]
    while told[-1][4:6] != b"\\3\\0": told.append(route.recv(65536))
    digest.update(bytes([any(b"lo\\0" in each for each in told)]))
    time.sleep(0.01); print(n)
print("sum", digest.hexdigest())
"""

_TIMERS = """
import os, select, signal, threading, time
fired, ticks = [], []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(time.monotonic()))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
late = threading.Timer(0.5, lambda: fired.append(1)); late.start()
waits = threading.Event(); waiting = threading.Thread(target=waits.wait); waiting.start()
event, poll = os.eventfd(5), select.epoll(); poll.register(event, select.EPOLLIN)
memory = os.memfd_create("kept"); os.write(memory, b"kept")
began = last = time.monotonic(); backwards = 0
for n in range(100):
    time.sleep(0.008); backwards += time.monotonic() < last; last = time.monotonic(); print(n)
signal.setitimer(signal.ITIMER_REAL, 0); late.join(); waits.set(); waiting.join()
is_even = ticks == sorted(ticks) and len(ticks) >= 20 and last - began < 60
print("sum", backwards, fired, is_even, poll.poll(1), os.eventfd_read(event))
print(os.pread(memory, 9, 0))
"""

_LOGGERS = """
import logging, queue, sys, threading, time
lines, logged = queue.Queue(), []
def write():
    while (n := lines.get()) is not None: logged.append(n); print(n); time.sleep(0.002)
def beat():
    while not done.is_set(): beats.append(1); time.sleep(0.003)
done, beats = threading.Event(), []
threads = [threading.Thread(target=t) for t in (write, beat)]; [t.start() for t in threads]
for n in range(150): lines.put(n); time.sleep(0.006)
lines.put(None); done.set(); [t.join() for t in threads]
print("sum", logged == list(range(150)), len(beats) > 10)
"""

_SLEEPS = """
import time
print(0); time.sleep(1.2); print(1); time.sleep(0.3); print(2); print("sum", 3)
"""

_IGNORES = """
import os, signal, subprocess, time
loop = "import signal, time\\nfor n in (1, 2, 13, 15, 18, 20): signal.signal(n, signal.SIG_IGN)\\n"
loop += "total = 0\\nwhile True:\\n total += 1; print(total, flush=True); time.sleep(0.005)"
child = subprocess.Popen(["python", "-c", loop], stdout=-1, text=True)
seen = [int(child.stdout.readline()) for _ in range(1)]
for n in range(100):
    child.terminate(); seen.append(int(child.stdout.readline())); time.sleep(0.004); print(n)
child.kill(); print("sum", sum(seen), child.wait())
"""

_LARGE = """
import hashlib, random, time
random.seed(5); parts = [bytearray(random.randbytes(1 << 24)) for _ in range(125)]
for n in range(60):
    for part in parts: part[n] = n
    time.sleep(0.02); print(n)
digest = hashlib.sha256()
for part in parts: digest.update(part)
print("sum", digest.hexdigest())
"""

_JUST_STARTED = "print(0); print('sum', 1)"

_JUST_ENDING = """
import atexit, os, threading, time
atexit.register(lambda: (time.sleep(0.3), print("sum", 1)))
for n in range(20): print(n)
open("ended", "w").write("x")
"""

_ORPHANS = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork(): time.sleep(10)
    os._exit(0)
os.wait()
for n in range(60): time.sleep(0.01); print(n)
print("sum", n)
"""

_LIGHTNING = """
import hashlib, logging, sys, time
import lightning as L, torch
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Model(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = torch.nn.Linear(16, 1); self.rate = torch.nn.Dropout(0.5)
    def training_step(self, batch, n):
        time.sleep(0.02); print(n); loss = self.rate(self.net(batch[0])).square().mean()
        self.log("loss", loss); return loss
    def configure_optimizers(self): return torch.optim.Adam(self.parameters())
L.seed_everything(1, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(150 * 8, 16))
model = Model(); trainer = L.Trainer(max_epochs=1, accelerator="cpu", log_every_n_steps=5,
    logger=L.pytorch.loggers.CSVLogger("logs"), enable_progress_bar=False,
    enable_model_summary=False, callbacks=[L.pytorch.callbacks.ModelCheckpoint("kept")])
trainer.fit(model, torch.utils.data.DataLoader(data, 8, shuffle=True))
print("sum", hashlib.sha256(model.net.weight.detach().numpy().tobytes()).hexdigest())
"""
_TRAINER = """
import hashlib, time, torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer
from transformers import TrainerCallback, TrainingArguments
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 480
    def __getitem__(self, n):
        row = (torch.arange(16) * (n + 1)) % 64; return {"input_ids": row, "labels": row}
class Tells(TrainerCallback):
    def on_step_end(self, args, state, control, **_): time.sleep(0.02); print(state.global_step - 1)
torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments("out", max_steps=120, per_device_train_batch_size=8, use_cpu=True,
    report_to="none", save_steps=50, dataloader_num_workers=2, disable_tqdm=True, seed=1)
trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[Tells()])
trainer.remove_callback(PrinterCallback)  # it prints how long it took
trainer.train()
digest = hashlib.sha256()
for part in model.parameters(): digest.update(part.detach().numpy().tobytes())
print("sum", digest.hexdigest())
"""


def _trains(data: str, layers: str, threads: int = 1) -> str:
    return _TRAINS.format(threads=threads, data=data, layers=layers)


PROGRAMS = (
    MatrixProgram("plain loop", _PLAIN),
    MatrixProgram("half lines", _TORN),
    MatrixProgram("children, deleted folder, /proc", _CHILDREN),
    MatrixProgram("MLP with AdamW", _trains(_RANDOM.format(shape="64, 32"), _MLP)),
    MatrixProgram(
        "convnet, two threads",
        _trains(_RANDOM.format(shape="64, 3, 16, 16"), _CONVNET, 2),
    ),
    MatrixProgram("DataLoader with two workers", _trains(_LOADER, _MLP)),
    MatrixProgram("tensors shared between processes", _SHARED_TENSORS),
    MatrixProgram("pool, semaphore, shared memory", _POOL),
    MatrixProgram("numpy in spawned processes", _NUMPY_POOL),
    MatrixProgram("files, locks, mapped file", _FILES),
    MatrixProgram("writes 100 MB", _BIG_FILE),
    MatrixProgram("SQLite, write-ahead log", _SQLITE_WAL),
    MatrixProgram("SQLite, rollback", _SQLITE, begins_again="kept.db is an open database"),
    MatrixProgram("pipes to a child", _PIPES),
    MatrixProgram("sockets", _SOCKETS),
    MatrixProgram("pours by TCP", _POURS),
    MatrixProgram("datagram at rest", _UNREAD, begins_again="a datagram is not read yet"),
    MatrixProgram("lists interfaces", _INTERFACES),
    MatrixProgram("timers, events, descriptors", _TIMERS),
    MatrixProgram("threads that log", _LOGGERS),
    MatrixProgram("sleeps", _SLEEPS),
    MatrixProgram("child that ignores signals", _IGNORES),
    MatrixProgram("2 GB of memory", _LARGE),
    MatrixProgram("just started", _JUST_STARTED, within_s=0.1),
    MatrixProgram("just ending", _JUST_ENDING),
    MatrixProgram("orphan", _ORPHANS, begins_again="has outlived its parent"),
    MatrixProgram("Lightning", _LIGHTNING, needs=("lightning",)),
    MatrixProgram("Hugging Face Trainer", _TRAINER, needs=("transformers", "accelerate")),
)
