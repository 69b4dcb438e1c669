"""A bank in two processes. The primary sends the changes of each transaction to the backup, which
keeps a replica of the accounts and goes on alone when the primary is killed.

    python replica.py [KILLED_AFTER [MECHANISM]]

After KILLED_AFTER transactions the backup kills the primary, wherever it is then.
"""

import hashlib
import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy
import pagemark

ACCOUNTS = 20_000
TRANSFERS = 300


class Bank:
    """Accounts in a region. Each transfer depends on nothing but the content of the region."""

    def __init__(self, mechanism: str) -> None:
        self.region = pagemark.Region(8 * (1 + ACCOUNTS), mechanism)
        words = numpy.frombuffer(self.region, dtype=numpy.int64)
        self.made, self.balances = words[:1], words[1 : 1 + ACCOUNTS]

    def transfer(self) -> pagemark.Changes:
        """Makes the next transfer. The first one opens the accounts."""
        with self.region.transaction(changes=True) as transaction:
            number = int(self.made[0])
            if number == 0:
                self.balances[:] = 100
            giver, taker = number * 7919 % ACCOUNTS, (number * 104729 + 1) % ACCOUNTS
            amount = min(number % 90, int(self.balances[giver]))
            self.balances[giver] -= amount
            self.balances[taker] += amount
            self.made[0] = number + 1
        assert transaction.changes is not None
        return transaction.changes


def primary(backup: Connection, mechanism: str) -> None:
    bank = Bank(mechanism)
    while bank.made[0] < TRANSFERS:
        changes = bank.transfer()
        backup.send_bytes(changes.without_old().encode())
        # Once the backup has the transfer, it can be confirmed to the customer.
        backup.recv_bytes()


def main() -> None:
    killed_after = int(sys.argv[1]) if len(sys.argv) > 1 else TRANSFERS + 1
    mechanism = sys.argv[2] if len(sys.argv) > 2 else "auto"
    bank = Bank(mechanism)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=primary, args=(there, mechanism))
    process.start()
    there.close()
    try:
        while True:
            # A message that the primary has not sent to its end is not received at all.
            pagemark.Changes(here.recv_bytes()).apply(bank.region)
            here.send_bytes(b"applied")
            if bank.made[0] == killed_after:
                process.kill()
    except (EOFError, OSError):
        process.join()
    print(f"the primary has ended after {bank.made[0]} transfers", file=sys.stderr)
    while bank.made[0] < TRANSFERS:
        bank.transfer()
    digest = hashlib.sha256(bank.balances.tobytes()).hexdigest()[:16]
    print(f"{bank.made[0]} transfers, {bank.balances.sum()} in all, accounts {digest}")


if __name__ == "__main__":
    main()
