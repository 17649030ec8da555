"""Starts the processes of a job, watches them, and cleans up.

In the order of a job's life:

    hosts.py        Host: the number of agents of each host, from ``--hosts``, a host file or Slurm
    slurm.py        the hosts and GPUs of a Slurm job; Allocation: waits for a job
    options.py      RunOptions: the options of a job
    gpus.py         lists the GPUs of a host, and assigns them to agents
    reservation.py  GPUs between jobs: Claim, Reservation
    launcher.py     Launcher: runs one job, from the first process to the last; reports lost agents
    job_files.py    JobFiles: the folders of a job, which are removed at its end
    mpiexec.py      Mpiexec: finds the program that starts the ranks, and writes its command line
    listener.py     Listener: the launcher's socket for supervisors; Observer, query_job: reports of agents
    supervise.py    a program: the parent of each process of the job; reports its exit, and ends it with the job
    versions.py     the versions that must be equal in all processes of a job
    member.py       Member: a process's connection to its supervisor, and over MPI to the other processes
    cuda_programs.py  CUDA calls of the program reach the agents' GPUs: `prepare`, `make_server`
    application.py  a program: runs the user's Python file, or its compiled program as a child, with a pool
    job_output.py   the output of agents and mpiexec, and the application's stdin
    kernel_spec.py  KernelSpec: a kernel of Jupyter that ``warpwell run`` starts
    describe.py     a program: writes the devices of its pool, for ``warpwell pool info``

The program of an agent is ``pool/agent/agent_main.py``.
"""
