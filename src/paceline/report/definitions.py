"""Definitions of the terms of the report page, in one or two sentences each.

The page shows them as tooltips. docs/reference/glossary.md includes those of ``GLOSSARY``, and
docs/reference/measures.md lists those that neither it nor the glossary defines elsewhere.
"""

from ..analyze.diagnosis.table import INDICATORS

DEFINITIONS = {
    # states
    "state": "What a rank does at an instant: useful, input, checkpoint, validation, core wait, "
    "other, wait or transfer. The states of a rank add up to its time.",
    "useful": "Time in which a rank computes for the model: forward, loss, backward, optimizer. On "
    "a GPU: the kernels that do not communicate.",
    "input": "Time in which a rank waits for the next batch of its loader.",
    "checkpoint": "Time in which training waits while a checkpoint is copied or written.",
    "validation": "Time in which a rank evaluates the model.",
    "starved": "Time in which the training thread was ready to run and waited for a core, as the "
    "kernel counts it. It is taken out of the state in which it lay.",
    "other": "Time that no other state explains, such as work of the script between the phases of "
    "a step.",
    "bubble": "Time in which a stage of a pipeline waits for another stage of it: for a message, "
    "or in a collective of the stages before its last rank arrived.",
    "wait": "Time in a collective before its last rank arrived.",
    "transfer": "Time in a collective after its last rank arrived, and in the calls that start a "
    "collective: the communication itself.",
    "exposed communication": "Communication time in which a rank does nothing else: wait and "
    "transfer. Its counterpart is overlap.",
    "hidden": "Communication that is in flight while the rank computes. It costs no time. Reports "
    "call it hidden.",
    "background": "Collectives that a thread other than the training thread waited for, such as "
    "those of an asynchronous checkpoint. They are counted beside the states.",
    "sharded block": "Parameters of a sharded model (FSDP2) that are gathered together: one call "
    "of fully_shard. (root) has the parameters outside of all other blocks.",
    "late": "Exposed time of one gather or reduction of a block: how long a rank does nothing else "
    "until the whole parameters, or the reduced gradients, are there.",
    # efficiencies
    "POP efficiencies": "Factors between 0 and 1, defined by the POP Centre of Excellence. Their "
    "product is the useful share.",
    "useful share": "Useful time of all ranks over the whole time of all ranks: mean(u) / T. It is "
    "the product of the parallel efficiency and the factors below it.",
    "parallel": "PE = LB x CommE = mean(b) / T, where b is a rank's time outside communication "
    "(POP Centre of Excellence). 0.8 and above is good.",
    "load_balance": "Mean over maximum of the ranks' time outside communication: LB = mean(b) / "
    "max(b). It is below 1 if a rank has more work than the others, or is slower.",
    "communication": "CommE = max(b) / T = serialisation x transfer, where b is a rank's time "
    "outside communication: the share of the time that the busiest rank spends outside "
    "communication.",
    "serialisation": "SerE = max(b) / T_id, where T_id is the time of the run replayed on an ideal "
    "network that takes no time. It is below 1 if ranks wait for each other alternately.",
    "transfer efficiency": "TE = T_id / T, where T_id is the time of the run replayed on an ideal "
    "network that takes no time. It is below 1 if the communication itself takes time that does "
    "not overlap with computing.",
    "no checkpoint": "Share of the time outside communication that remains without checkpoints.",
    "no validation": "Share of the remaining time that remains without validation.",
    "no input": "Share of the remaining time that remains without waits for batches.",
    "no starved": "Share of the remaining time that remains without waits for a core.",
    "no bubble": "Share of the time outside communication that remains without waits for other "
    "stages of a pipeline.",
    "no other": "Share of the remaining time that remains without other work of the script. The "
    "rest is the useful time.",
    # the run
    "rank": "One process of the training. World size is the number of ranks.",
    "node": "One computer of a cluster.",
    "step": "One optimizer step of all ranks.",
    "window": "The measured part of a run: from the end of the first optimizer step of the last "
    "rank to the last event. It is the same for all ranks.",
    "samples/s": "Samples of all ranks in the steps of the window, over the length of the window. "
    "The window includes validation and checkpoints.",
    "start-up": "Time from the command to the start of the first training step. Without paceline "
    "run, it begins with the start of the process.",
    "steps": "Optimizer steps of this run, or since its last restart.",
    "wall time": "Time from the command to the last event. Without paceline run, it begins with "
    "the start of the process.",
    "slowest": "The rank with the most time outside communication, and how much more that is than "
    "the mean of all ranks.",
    "step time": "Time from the end of an optimizer step on the last rank to the end of the next "
    "one on the last rank. A validation or a checkpoint between them belongs to the later step.",
    "percentile": "90 % of the steps take a time between the 5th and the 95th percentile.",
    "outlier": "A step that is longer than the median by 5 scaled median absolute deviations, and "
    "by half of the median. Its cause is the state in which ranks were longer than in their median "
    "step.",
    "waiting map": "The share of a rank's step in which it waited for the last rank to arrive.",
    "straggler": "A rank that repeatedly arrives later than the others.",
    "waited for": "Paceline attributes each wait to the rank that arrived last in the collective, "
    "or to the root or the peer. Waits that are not longer than the clock residual have no rank.",
    "did longer": "The state in which the late rank was longer than the waiting rank since both "
    "last left a common collective.",
    "loss": "A share of all ranks' time that was not useful. All losses add up to 1 minus the "
    "useful share. This is not the loss of the model.",
    # collectives
    "collective": "An operation of all ranks of a process group: all-reduce, broadcast, barrier, "
    "...",
    "all-reduce": "The collective that gives every rank the sum (or mean) of all ranks' vectors.",
    "broadcast": "The collective that copies the vector of one rank to all ranks.",
    "all-gather": "The collective that gives every rank the vectors of all ranks.",
    "reduce-scatter": "The collective that gives every rank one part of the sum of all ranks' "
    "vectors.",
    "all-to-all": "The collective in which every rank sends a part of its vector to every rank.",
    "barrier": "The collective that every rank leaves after all ranks have entered it.",
    "group": "The ranks that take part in a collective. torch.distributed creates them. Shares are "
    "of the time of its ranks.",
    "mesh axis": "The process groups along one axis of the layout, such as data or tensor. Its "
    "efficiency is 1 minus its waits and transfers, as shares of all ranks' time: the product of "
    "wait efficiency (1 minus waits) and transfer efficiency.",
    "count": "Number of calls of the collective in the window. A call of all ranks counts once.",
    "bytes": "Size of the whole vector, mean of all calls: the tensor of an all-reduce, the output "
    "of an all-gather, the input of a reduce-scatter.",
    "algbw": "Algorithm bandwidth: bytes of the whole vector over the time from the last start to "
    "the last end of a collective. Median over collectives of at least 64 KiB.",
    "busbw": "Bus bandwidth: algorithm bandwidth times the factor of nccl-tests, which is 2(p-1)/p "
    "for all-reduce and (p-1)/p for reduce-scatter, all-gather and all-to-all. Comparable with the "
    "bandwidth of a link.",
    # the roofline
    "FLOPs": "Floating-point operations of matrix products, convolutions and attention, as "
    "torch.utils.flop_counter counts them in one step. A multiply-add counts as two; elementwise "
    "operations count as none.",
    "traffic": "Bytes of the inputs and outputs of every operator, each counted once. Caches "
    "between operators are ignored.",
    "roofline": "Attainable arithmetic rate at a given ratio of arithmetic to memory traffic: "
    "min(peak, FLOP/byte x memory bandwidth). paceline check measures the peak and the bandwidth.",
    # reliability
    "cores": "The cores on which the process of a rank may run.",
    "threads": "Number of threads with which PyTorch computes in a rank.",
    "recording cost": "Share of the time after start-up that the recording itself took, on the "
    "rank where it is largest. Each event, hook and wrapped collective counts with its measured "
    "cost.",
    "clock residual": "Maximum error of the clock of another node after the alignment. The bounds "
    "follow from collectives: no rank leaves a barrier before the last rank has entered it.",
    "missing": "Ranks of the job without a record. The figures do not include them.",
    "unmatched": "Collectives and messages for which the record of a member is missing.",
    "events": "Entries of the records: a phase, a step, a collective, a wait.",
    "confidence": "Share of ranks with a record x share of blocked time in collectives that all "
    "participating ranks recorded x share of blocked time outside of waits below the clock "
    "residual x share of undamaged events.",
    # several runs
    "noise": "A change is larger than the noise if equal runs differ by as much in at most 5 % of "
    "cases. The noise follows from the spread between runs, or from the spread over ten parts of "
    "each run and an assumed spread between runs.",
    "speed-up": "Samples/s over those of the run with the fewest ranks.",
    "scaling efficiency": "Speed-up over the ratio of the numbers of ranks: GE(P) / GE(P_ref).",
    "computation scalability": "CS = (useful time per sample on the fewest ranks) / (useful time "
    "per sample of this run). It is below 1 if the same work takes longer, because of smaller "
    "batches per rank or memory bandwidth that more ranks share.",
    "global efficiency": "GE = useful share x computation scalability.",
    "statistical efficiency": "Samples to the target on the fewest ranks, over those of this size. "
    "It is below 1 if a larger global batch needs more samples until the same value.",
    "energy": "Energy of the measured steps over their samples. It is an estimate if a counter "
    "covers more than the job, and the job is charged by its share of the cores.",
    "step_ms": "Length of the window over its number of steps, in milliseconds.",
    # a diagnosis
    "cause": "Something that makes steps longer, with its share of a step's time, as paceline "
    "diagnose names it.",
    "waterfall": "The throughput from the ideal to the measured one, with the share of each loss.",
    "ideal": "The throughput of one rank alone with its batches in memory, times the number of "
    "ranks: no loader, no communication, and no other rank on the machine.",
    "measured rate": "The throughput of all ranks with all parts on, at the rate of the slowest "
    "rank.",
    "of the ideal": "Samples/s over those of the ideal. The shares of all bars add up.",
    "step share": "Share of the time of a step with all parts on: approximately how much shorter a "
    "step would be without this part. It differs from the share of the ideal throughput.",
    "interval": "90 % interval of the mean over the rounds, by Student's t. Nine of ten diagnoses "
    "have an interval that contains the true mean.",
    "cause interval": "The 90 % interval of the experiment, extended to contain the value of the "
    "record.",
    **{f"held by {indicator.name}": indicator.definition for indicator in INDICATORS.values()},
    "remedy": "A change that addresses a cause, with a predicted gain: a knob or an edit of the "
    "script.",
    "predicted gain": "Relative increase of samples/s with this remedy alone, as predicted before "
    "the remedy is tried, with its interval.",
    "prediction": "Source of the prediction: the ladder switched the cause off; the record "
    "contains its time; a formula combines both; or Paceline measured a few steps with the remedy.",
    "measured gain": "Mean over the rounds and its 90 % interval, measured with and without the "
    "remedy alternately, in addition to all remedies that were kept before. Paceline keeps a "
    "remedy if the whole interval is above zero.",
    "experiment": "How much shorter a step is with this part switched off: mean over all rounds, "
    "and its 90 % interval.",
    "record": "Share of the ranks' time in this state, and in waits for ranks in this state, in "
    "the last measurement with all parts on.",
    "differ": "They differ if the record is outside of the interval of the experiment by a "
    "relevant amount.",
    "rung": "One experiment of the ladder. Batches in memory are the first batches of the loader, "
    "used repeatedly.",
    "rung step": "Mean of the measured steps.",
    "round": "One measurement of every rung.",
    "measured steps": "Optimizer steps that each measurement takes, after the warm-up.",
    "warm-up": "Optimizer steps before the measured ones. They are not measured.",
    "interleaved": "Measured in alternation (A, B, A, B), so that slow changes of the machine "
    "affect both.",
    "line time": "Share of a step in which the line is the innermost one of the script's code on "
    "the stack, mean of all ranks, from stack samples. Libraries belong to the line that calls "
    "them.",
    "with calls": "The same, and the functions of the script's code that the line calls.",
    "operator share": "Time of the operator in three profiled steps, relative to a step without "
    "the profile.",
    "of roofline": "Rate of the operator, relative to what arithmetic and memory bandwidth allow.",
    "confirmed": "An experiment switched the cause off, and steps were shorter.",
    "usual cost": "A loss of any training on several ranks: exchange, waits for ranks that are "
    "late in turn, shared clock and caches. It is a cause from 20 % of a step on.",
    "not-confirmed": "An experiment switched the cause off, and steps were not shorter by 5 %, or "
    "by an uncertain amount. It is not counted as a cause.",
    "not-testable": "No experiment can switch the cause off from outside of the script, or the "
    "rounds are too few. The share is what the record measured, or an estimate.",
    "survey": "The first run of a diagnosis: the unchanged script, longer than the experiments. It "
    "gives the share of work that few steps have, such as validation and checkpoints.",
    "upper bound": "The whole time of these operators; what a change saves is less.",
    "diagnosis time": "Duration of the whole diagnosis, including the start of the runs.",
}

# Terms of the glossary that the page shows, with their keys in DEFINITIONS.
_UNCHANGED = (
    *("all-reduce", "bubble", "cause", "collective", "exposed communication", "ideal"),
    *("interleaved", "node", "noise", "POP efficiencies", "rank", "remedy", "roofline"),
    *("round", "rung", "state", "step", "straggler", "survey", "transfer", "wait", "waterfall"),
    "window",
)
GLOSSARY = {
    **{term: term for term in _UNCHANGED},
    "bandwidth, algorithm": "algbw",
    "bandwidth, bus": "busbw",
    "confirmed cause": "confirmed",
    "load balance": "load_balance",
    "loss, of time": "loss",
    "overlap": "hidden",
    "process group": "group",
    "useful time": "useful",
}
