"""In place of apptainer, and of an srun that has pyxis: takes what their documentation lists, notes it, and runs the
rest as they would, without a container.

RECORD is the file to note it in, REAL_SRUN the srun that knows no containers.
"""

import json
import os
import sys

MOUNT = "--container-mounts"
PYXIS = ("--container-image", MOUNT, "--container-workdir")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def note(**options: object) -> None:
    with open(os.environ["RECORD"], "a") as record:
        record.write(json.dumps(options) + "\n")


def apptainer(command: str, *words: str) -> None:
    """apptainer exec [--nv] [--bind SRC[:DST[:OPTIONS]],...] [--pwd PATH] IMAGE COMMAND ..."""
    assert command == "exec", command
    rest, options = list(words), {}
    while rest[0].startswith("-"):
        option = rest.pop(0)
        options[option] = {"--nv": lambda: True, "--bind": lambda: rest.pop(0), "--pwd": lambda: rest.pop(0)}[option]()
    image, *rest = rest
    note(image=image, **options)
    for mount in options["--bind"].split(","):
        assert os.path.exists(mount.split(":")[0]), mount
    os.chdir(options["--pwd"])
    os.environ["PATH"] = DEFAULT_PATH  # the host's does not hold in there
    os.execvp(rest[0], rest)


def srun(*words: str) -> None:
    """srun --container-image=IMAGE --container-mounts=SRC:DST[:FLAGS],... --container-workdir=PATH [...] COMMAND ..."""
    first = next(i for i, word in enumerate(words) if not word.startswith("-"))
    given = dict(word.partition("=")[::2] for word in words[:first] if word.startswith("--container"))
    assert given.keys() <= set(PYXIS), given
    note(**given)
    for mount in given[MOUNT].split(","):
        source, target, *flags = mount.split(":")
        assert os.path.isabs(source) and os.path.isabs(target) and len(flags) <= 1, mount
    rest = [word for word in words[:first] if word.partition("=")[0] not in given]
    workdir = f"--chdir={given['--container-workdir']}"
    os.execv(os.environ["REAL_SRUN"], ["srun", *rest, workdir, *words[first:]])


if __name__ == "__main__":
    {"apptainer": apptainer, "srun": srun}[os.path.basename(sys.argv[0])](*sys.argv[1:])
