"""Prints the tag of the wheel that serves the Python that runs this: its version and its interface."""

import sys
import sysconfig

version = "cp%d%d" % sys.version_info[:2]
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(f"{version}-{version}t")
elif sys.version_info >= (3, 11):
    # The stable interface, with buffers.
    print("cp311-abi3")
else:
    print(f"{version}-{version}")
