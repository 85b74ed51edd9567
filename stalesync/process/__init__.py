"""Hold the processes of a run together: Ray, signals, logs, hosts, and how a failure reaches the user.

failures       the root cause of a failed stage, as `RunFailed`; `run_log`, `process_log`: record it and every log
ray_cluster    start Ray on loopback with a token, or join a cluster; end a run whose main thread waits in Ray;
               `ray_folder`: where its files lie
ray_processes  notice that a process of Ray has ended; `process_ends`: what ended first, and how
ray_guard      end Ray's processes if the controller is killed
stopping       end a run by a signal; `output`: go on without a reader of the output
hosts          names of hosts and ranks; `host_check`, `host_files`: refuse hosts that cannot train together
garbage        rare garbage collection; `in_flight`: calls whose answers are awaited later
card_environment  the variables with which the processes of real cards start

`failures`, `hosts`, `run_log` and the watchers import neither torch nor the loop: the guard is a process that stays
small."""
