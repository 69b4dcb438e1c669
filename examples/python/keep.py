"""Keeps a program alive: takes a checkpoint of the program every second, and restores the newest
checkpoint if a signal kills the program.

Needs root and CRIU.

    python keep.py REPOSITORY PROGRAM [ARGUMENT...]
"""

import os
import subprocess
import sys

import pagemark

JOB = "keep"


def report(text: object) -> None:
    print(f"keep: {text}", flush=True)


repository = pagemark.Repository(sys.argv[1])
# A program that leads a session of its own can be restored without this terminal.
pid = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True).pid
while True:
    try:
        with pagemark.Job(pid, repository, JOB, keep_last=10) as job:
            report(f"process {pid} is checkpointed by {job.mechanism}")
            # The run returns when the program ends. A failed checkpoint is tried again after a second.
            job.run(every=1.0, on_checkpoint=lambda checkpoint: report(checkpoint.sequence), on_failure=report)
    except pagemark.ProcessGoneError:
        pass
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status >= 0 or not repository.checkpoints(JOB):
        break
    restored = pagemark.restore(repository, JOB, child=True)
    report(f"signal {-status} killed process {pid}; it was restored")
    for file in restored.files:
        aside = f"; its previous content is in {file.set_aside}" if file.set_aside else ""
        report(f"{file.path} was put back{aside}")
report(f"the program ended with status {status}")
