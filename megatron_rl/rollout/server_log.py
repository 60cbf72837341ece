"""What an SGLang server's log says of its end."""

import re

LOG_TAIL_LINES = 15
_ERROR_LINE = re.compile(
    r"^(?:\[[^\]]*\] )?(?:.*: )?((?:[A-Za-z_]+\.)*[A-Za-z_]*(?:Error|Exception|Interrupt|Exit): .+|ERROR: .+"
    r"|error: argument .+)"  # of argparse, after a page of usage
)
PORT_TAKEN = re.compile(r"address already in use|Port \d+ is already in use|port .* not available", re.IGNORECASE)
NO_PLUGIN = re.compile(r"Failed to (?:load|execute) (?:general )?plugin:? megatron_rl")


def server_errors(log: str) -> list[str]:
    """The last lines of a server's log that name its errors, each once."""
    errors = [m.group(1) for line in log.splitlines() if (m := _ERROR_LINE.match(line))]
    return list(dict.fromkeys(errors))[-3:]


def server_error(log: str) -> str:
    """The errors of a server's log; else its last lines."""
    return "\n".join(server_errors(log) or log.splitlines()[-LOG_TAIL_LINES:])
