"""`python -m firebrick`: runs the program that this wheel installed."""

import os
import subprocess
import sys
import sysconfig


def program():
    """Path of the program: in the scripts folder of this installation, of the user's, or beside a `--target` folder."""
    name = "firebrick.exe" if os.name == "nt" else "firebrick"
    user = sysconfig.get_path("scripts", "nt_user" if os.name == "nt" else "posix_user")
    target = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin")
    folders = [sysconfig.get_path("scripts"), user, target]
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    sys.exit(f"firebrick: the program is in none of {', '.join(folders)}; install again: pip install --force-reinstall firebrick")


if __name__ == "__main__":
    command = [program(), *sys.argv[1:]]
    if os.name == "nt":
        sys.exit(subprocess.call(command))
    os.execv(command[0], command)
