"""What a context needs of the process that runs its code."""

from abc import ABC, abstractmethod

# A start may take long where the CPU is emulated and several kernels start at once.
START_SECONDS = 300


class KernelDied(Exception):
    """The process ended, or could not be started."""


class UnknownLanguage(Exception):
    """Nothing on this machine runs it."""


class Kernel(ABC):
    """One process, for one context. It is started once and stopped once."""

    @abstractmethod
    async def start(self, cwd):
        """Returns when it is ready for code."""

    @abstractmethod
    async def execute(self, code, emit):
        """Runs code and awaits `emit(event)` for each event, until it has ended. Raises `KernelDied`."""

    @abstractmethod
    async def change_environment(self, changed):
        """Applies `environment.changes`."""

    @abstractmethod
    async def interrupt(self):
        """Asks for the end of what runs; `execute` then returns."""

    @abstractmethod
    async def stop(self):
        """Ends the process and those that it started; an `execute` under way raises `KernelDied`."""
