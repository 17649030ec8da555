"""`Conversation`: a process that a test leads step by step, by lines through its pipes."""

import subprocess


class Conversation:
    """A process with pipes at its standard input and output, in text mode."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        """Return the next line of the process."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def post(self) -> None:
        """Send the process an empty line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
