"""`python -m firebrick`: runs the program that this wheel installed."""

import os
import subprocess
import sys
import sysconfig


def program():
    """Path of the program: in the scripts folder of this installation or of the user's, or beside this package's folder."""
    name = "firebrick.exe" if os.name == "nt" else "firebrick"
    user = sysconfig.get_path("scripts", "nt_user" if os.name == "nt" else "posix_user")
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # `pip --target`, then PREFIX/lib/pythonX.Y/{site,dist}-packages: Debian's pip installs into another prefix than Python's
    beside = [os.path.join(packages, "bin"), os.path.normpath(os.path.join(packages, "..", "..", "..", "bin"))]
    folders = [sysconfig.get_path("scripts"), user, *beside]
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
