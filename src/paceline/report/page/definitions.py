"""Definition of each figure in one or two sentences, shown as a tooltip.

The full definitions are in docs/reference/measures.md.
"""

DEFINITIONS = {
    # states
    "useful": "Computing for the model: forward, loss, backward, optimizer. On a GPU: the kernels "
    "that do not communicate.",
    "input": "Waiting for the next batch: the loader was not ahead.",
    "checkpoint": "Standing still for a save.",
    "validation": "Evaluating.",
    "other": "What no state explains, the script's own work between its steps' phases included.",
    "wait": "Blocked in a communication before the last member of its group has arrived.",
    "transfer": "Blocked in a communication after the last member arrived, and in the calls that "
    "launch one: the exchange itself.",
    "hidden": "Communication in flight while the rank did something else: it costs nothing.",
    "background": "Collectives that another thread than the training one waited for (an "
    "asynchronous checkpoint's), beside the states.",
    # the tree
    "useful share": "Useful time of all ranks over all their time: mean(u) / T. Parallel "
    "efficiency times the four factors below it, exactly.",
    "parallel": "PE = LB x CommE = mean(b) / T, where b is a rank's time outside communication "
    "(POP Centre of Excellence). 0.8 and above is called good.",
    "load_balance": "LB = mean(b) / max(b), where b is a rank's time outside communication. Below "
    "1 where one rank has more to do, or is slower, than the others.",
    "communication": "CommE = max(b) / T = serialisation x transfer: how much of the time even "
    "the busiest rank spends outside communication.",
    "serialisation": "SerE = max(b) / T_id, with T_id the run replayed on a network that takes no "
    "time. Below 1 where ranks wait for each other in turns.",
    "transfer efficiency": "TE = T_id / T, with T_id the run replayed on a network that takes no "
    "time. Below 1 where the exchange itself takes time that nothing hides.",
    "no checkpoint": "Time outside communication without saves, over time outside communication.",
    "no validation": "What is left without validation, over what was left before.",
    "no input": "What is left without waiting for batches, over what was left before.",
    "no other": "What is left without the script's other work (that is the useful time), over "
    "what was left before.",
    # the run
    "window": "The measured part, the same for all ranks: from the end of the first optimizer step "
    "(the warm-up) of the last rank to have finished it, to the last event of all.",
    "samples/s": "Samples of all ranks in the window's steps, over the window. Validation and "
    "saves in it count as time.",
    "start-up": "From the command (without paceline run: from the process's start) to the first "
    "training step's start.",
    "steps": "Optimizer steps of this run, or since its last restart.",
    "wall time": "From the command (without paceline run: from the process's start) to the last "
    "event of all.",
    "slowest": "The rank with the most time outside communication (b), and by how much that is "
    "over the mean of all ranks.",
    "step time": "From the last rank's end of one optimizer step to the last rank's end of the "
    "next: a validation or a save between them belongs to the later step.",
    "outlier": "A step that took longer than the median by 5 scaled median absolute deviations, "
    "and by half of the median. It is explained by what ranks did longer in it than in their "
    "median step.",
    "waiting map": "The share of a rank's step in which it waited for the last rank to arrive.",
    "waited for": "Every wait is booked to the rank that arrived last in its collective, or to the "
    "root or peer. Waits not longer than the clocks' residual are booked to nobody.",
    "did longer": "A wait is explained by what the late rank did more than the waiting one since "
    "both were last together.",
    "loss": "A share of all ranks' time (P x T) that was not useful. All losses add up to 1 minus "
    "the useful share.",
    # collectives
    "group": "A torch.distributed process group. Shares are of its members' time.",
    "count": "How often the collective was called in the window, all members together once.",
    "bytes": "Of the whole vector, one call on average: an all-reduce's tensor, an all-gather's "
    "output, a reduce-scatter's input.",
    "algbw": "Algorithm bandwidth: bytes over the time from the last start to the last end. Median "
    "over those of at least 64 KiB.",
    "busbw": "Bus bandwidth, as in nccl-tests: algbw x 2(p-1)/p for all-reduce, x (p-1)/p for "
    "reduce-scatter, all-gather and all-to-all. Compare it with the link's.",
    # the roofline
    "FLOPs": "Of matrix products, convolutions and attention, a multiply-add as two "
    "(torch.utils.flop_counter); elementwise work counts none. Counted in one step, operator by "
    "operator.",
    "traffic": "Inputs and outputs of every operator once, as if nothing stayed in a cache between "
    "two of them.",
    "roofline": "Attainable FLOP/s = min(peak, FLOP/byte x memory bandwidth) (Williams, Waterman, "
    "Patterson 2009), with the peak and the bandwidth that paceline check measured.",
    # where and how sure
    "cores": "The cores that a rank's process may run on.",
    "threads": "Threads that PyTorch computes with in a rank.",
    "recording cost": "What recording itself took, of the time after start-up, on the rank where "
    "it is largest: every event, hook and wrapped collective times its cost measured in the "
    "process before it trained.",
    "clock residual": "How far the clock of another host may be off after the alignment, by the "
    "bounds that collectives give: nobody can leave one before the last one has entered it.",
    "missing": "Ranks of the job without a record: the figures leave them out.",
    "unmatched": "Collectives and messages that lack a member's record.",
    "events": "What the ranks have written down: a phase, a step, a collective, a wait.",
    "confidence": "The share of ranks with a record x the share of blocked time whose collectives "
    "have all members' records x the share of blocked time not in waits below the clocks' residual "
    "x the share of undamaged events.",
    # several runs
    "noise": "A change is more than noise where it exceeds twice its standard error, from the "
    "figure's spread over tenths of each run.",
    "speed-up": "Samples/s over those of the run with the fewest ranks.",
    "scaling efficiency": "Speed-up over the ratio of the ranks: GE(P) / GE(P_ref).",
    "computation scalability": "CS = (useful time a sample on the fewest ranks) / (useful time a "
    "sample here). Below 1 where the same work takes longer: smaller batches a rank, memory "
    "bandwidth shared by more ranks.",
    "global efficiency": "GE = useful share x computation scalability.",
    "step_ms": "The window over its steps, in milliseconds.",
    # a diagnosis
    "ideal": "What one rank does alone, its batches kept in memory, times the number of ranks: no "
    "loader, no exchange, the machine to itself.",
    "measured rate": "All ranks with everything switched on, at the pace of the slowest.",
    "of the ideal": "Samples/s over those of the ideal. What the bars take of it adds up.",
    "step share": "Of the time that a step takes with everything switched on: about what a step "
    "would be shorter by without it. Percentages of the ideal's samples/s are others.",
    "interval": "Of the mean over the rounds, by Student's t: in nine of ten diagnoses it holds "
    "the true mean, as far as rounds differ by chance.",
    "cause interval": "The experiment's 90 % interval, wide enough to hold what the record says "
    "as well.",
    "held by sharing": "The ideal, minus all ranks at once without exchange, as if all had the "
    "pace of the fastest: they share cores, caches and the bandwidth of memory.",
    "held by uneven": "All ranks without exchange: as if all had the pace of the fastest, minus "
    "all at the pace of the slowest.",
    "held by exchange": "All ranks with their batches in memory: without the exchange, minus with "
    "it.",
    "held by input": "All ranks with the exchange: their batches in memory, minus everything.",
    "held by validation": "All ranks without exchange, at the pace of the slowest: without the "
    "steps' validation, minus with it. The ideal has none.",
    "held by checkpoint": "All ranks without exchange, at the pace of the slowest: without the "
    "steps' saving, minus with it. The ideal has none.",
    "held by standing": "What all ranks are on no core within their steps, without exchange, "
    "without a loader to wait for and without a thread that holds them.",
    "held by noise": "What each rank at least waits for a core while other programs than the job "
    "keep some of them.",
    "held by threads": "All ranks without exchange: a step, minus one with a single thread a rank.",
    "held by layout": "One rank with its batch in memory: a step, minus one in which convolutions "
    "have weights and images as channels-last.",
    "held by precision": "A step, minus one of the same script in float32. The record: the useful "
    "share, times what a product of matrices takes longer in float64 than in float32 on these "
    "cores.",
    "held by allocator": "A step, minus one in which freed memory is kept. The record: pages that "
    "were touched for the first time, times what one takes, or the time inside the kernel where "
    "that is less.",
    "held by memory": "That some process of the host waited for memory, as the kernel tells it.",
    "held by collector": "Steps with Python's garbage collector, minus steps without it, in turns. "
    "The record: the time inside collections.",
    "held by interpreter": "Steps with the script's other Python threads, minus steps in which "
    "they are paused, in turns. The record: what they computed while the training thread did "
    "neither compute nor wait for a core.",
    "held by search": "A step, minus one without the search. The record: DDP's search after each "
    "forward, and the exchange of its map of parameters that were used; where all are.",
    "held by script": "What the script does between the phases of its steps. The record alone "
    "tells it.",
    "remedy": "One thing that can be changed: from outside, or by an edit of the script.",
    "predicted gain": "By how much more samples/s there would be with it and nothing else changed, "
    "from before it was tried, and between which bounds.",
    "prediction": "The ladder has switched the cause off; the record says how long it takes; a "
    "formula combines both; a few steps with it were measured.",
    "measured gain": "With it and without it in turns, besides all that was kept before: the mean "
    "of the rounds and its 90 % interval. It is kept where all of that is above nothing.",
    "experiment": "By how much a step was shorter with it switched off: the mean of all rounds, "
    "and its 90 % interval.",
    "record": "The share of the ranks' time in it, and in waits for ranks that were in it, in the "
    "last measurement with everything.",
    "differ": "They differ where the record is outside the experiment's interval by more than is "
    "worth a word.",
    "rung": "What was on. Batches in memory: the loader's first ones, given in turns.",
    "rung step": "The mean of the measured steps.",
    "round": "Everything in the table of measurements once, one after the other.",
    "measured steps": "Optimizer steps that each measurement takes, after the warm-up.",
    "warm-up": "Optimizer steps before those that are measured, which are left out.",
    "diagnosis time": "Everything, starting the runs included.",
}
