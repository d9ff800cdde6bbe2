"""Mistakes of checkpoints and of resumed runs."""

from cases import Planted

CASES = [
    Planted(
        "checkpoint-incomplete",
        "average-not-saved",
        "keywords_ema",
        (
            ('        average.load_state_dict(state["average"])\n', ""),
            (
                '        net.load_state_dict(state["net"])\n',
                '        net.load_state_dict(state["net"])  # <mistake>\n',
            ),
            ('                "average": average.state_dict(),\n', ""),
            (
                '                "net": net.state_dict(),\n',
                '                "net": net.state_dict(),  # <mistake>\n',
            ),
            (
                '        state = torch.load(args.checkpoint, map_location="cpu")\n',
                '        state = torch.load(args.checkpoint, map_location="cpu")  # <mistake>\n',
            ),
            (
                '            torch.save(state, args.checkpoint + ".tmp")\n',
                '            torch.save(state, args.checkpoint + ".tmp")  # <mistake>\n',
            ),
            (
                "    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))\n",
                "    average = AveragedModel(  # <mistake>\n"
                "        net, multi_avg_fn=get_ema_multi_avg_fn(0.9)\n    )\n",
            ),
        ),
    ),
    Planted(
        "checkpoint-written-by-all",
        "callback",
        "tagger_trainer",
        (
            (
                """        if state.is_world_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            path = os.path.join(args.output_dir, f"weights-{state.epoch:.0f}.pt")
            torch.save(model.state_dict(), path)
""",
                """        os.makedirs(args.output_dir, exist_ok=True)
        path = os.path.join(args.output_dir, f"weights-{state.epoch:.0f}.pt")
        torch.save(model.state_dict(), path)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "resume-differs",
        "prefix-not-strict",
        "keywords_ema",
        (
            (
                '                "net": net.state_dict(),\n',
                '                "net": model.state_dict(),  # <mistake>\n',
            ),
            (
                '        net.load_state_dict(state["net"])\n',
                '        net.load_state_dict(state["net"], strict=False)  # <mistake>\n',
            ),
            (
                '        state = torch.load(args.checkpoint, map_location="cpu")\n',
                '        state = torch.load(args.checkpoint, map_location="cpu")  # <mistake>\n',
            ),
        ),
    ),
    Planted(
        "resume-differs",
        "rate-reset",
        "denoise_plateau",
        (
            (
                "        run.load(args.to)\n",
                """        run.load(args.to)  # <mistake>
        for group in optimizer.param_groups:  # --lr may be another one now
            group["lr"] = args.lr  # <mistake>
""",
            ),
            (
                '        self.optimizer.load_state_dict(state["optimizer"])\n',
                '        self.optimizer.load_state_dict(state["optimizer"])  # <mistake>\n',
            ),
        ),
    ),
    Planted(
        "resume-repeats-samples",
        "global-count-skipped",
        "clicks_stream",
        (
            (
                """def save(path, model, optimizer, epoch, steps):
""",
                """def save(path, model, optimizer, epoch, clicks):
""",
            ),
            (
                """    state |= {"epoch": epoch, "steps": steps}
""",
                """    state |= {"epoch": epoch, "clicks": clicks}  # <mistake>
""",
            ),
            (
                """        first_epoch, first_step = state["epoch"], state["steps"]
""",
                """        first_epoch = state["epoch"]
        first_step = state["clicks"] // args.batch  # <mistake>
""",
            ),
            (
                """                save(args.state, model, optimizer, epoch, step)
""",
                """                clicks = step * args.batch * world_size  # of this epoch
                save(args.state, model, optimizer, epoch, clicks)  # <mistake>
""",
            ),
            (
                "        log.epoch, log.first_step = epoch, first_step\n",
                "        log.epoch, log.first_step = epoch, first_step  # <mistake>\n",
            ),
            (
                "        for step, (x, y) in enumerate(loader, first_step + 1):\n",
                "        for step, (x, y) in enumerate(loader, first_step + 1):  # <mistake>\n",
            ),
        ),
        true=("samples-never-trained",),
    ),
]
