"""A client of Jupyter: starts the kernel "warpwell", executes cells, interrupts, restarts, and ends it."""

import sys
import threading

from jupyter_client.manager import start_new_kernel

kernel, client = start_new_kernel(kernel_name="warpwell")
kernel.kernel_spec.interrupt_mode = sys.argv[1]


def execute(text, interrupt=False):
    said = []
    if interrupt:
        threading.Timer(0.5, kernel.interrupt_kernel).start()
    reply = client.execute_interactive(text, timeout=120, output_hook=said.append, allow_stdin=False)
    output = "".join(m["content"].get("text", "") for m in said if m["msg_type"] == "stream")
    return reply["content"].get("ename"), output


def check(found, wanted):
    assert found == wanted, (found, wanted)


try:
    check(execute("import time, warpwell as ww; d = ww.devices(); print(len(d))"), (None, "2\n"))
    for _ in range(2):
        check(execute("time.sleep(30)", interrupt=True)[0], "KeyboardInterrupt")
        check(execute("d[1].call(time.sleep, 1); d[1].synchronize()", interrupt=True)[0], "KeyboardInterrupt")
    check(execute("with d[1]: print(d[1].call(sum, [1, 2]).get())"), (None, "3\n"))
    check(execute("d[0].call(print, 'from an agent').get(); time.sleep(0.5)"), (None, "from an agent\n"))
    kernel.restart_kernel()
    client.wait_for_ready(timeout=120)
    check(execute("import warpwell as ww; print(len(ww.devices()))"), (None, "2\n"))
finally:
    client.stop_channels()
    kernel.shutdown_kernel()
print("all is well")
