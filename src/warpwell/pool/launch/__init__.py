"""Starts the processes of a job, watches them, and clears up.

In the order of a job's life:

    hosts.py        Host: how many agents each host gets, from ``--hosts``, a host file or Slurm
    slurm.py        the hosts and GPUs of a Slurm job; Allocation: waits for a job
    options.py      RunOptions: the options of a job
    gpus.py         the GPUs of a host: listing them, assigning them to agents
    reservation.py  GPUs between jobs: Claim, Reservation
    launcher.py     Launcher: runs one job, from the first process to the last; reports lost agents
    job_files.py    JobFiles: the folders of a job, which do not outlive it
    mpiexec.py      Mpiexec: finds the program that starts the ranks, and writes its command line
    listener.py     Listener: where supervisors connect to the launcher; Observer, ask_job: reports of agents
    supervise.py    a program: the parent of every process of the job; reports how it ends, and ends it with the job
    versions.py     the versions that all processes of a job must have in common
    member.py       Member: a process's end of the connection to its supervisor; how it joins the others over MPI
    cuda_programs.py  CUDA calls of the program reach the agents' GPUs: `prepare`, `make_server`
    application.py  a program: runs the user's Python file, or its compiled program as a child, with a pool
    job_output.py   what agents and mpiexec write, and the application's stdin
    kernel_spec.py  KernelSpec: a kernel of Jupyter that ``warpwell run`` starts
    describe.py     a program: writes the devices of its pool, for ``warpwell pool info``

The program of an agent is ``pool/agent/agent_main.py``.
"""
