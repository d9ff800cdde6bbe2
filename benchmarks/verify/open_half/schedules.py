"""Mistakes of learning rates and schedules, of checkpoints and resumed runs."""

from cases import Planted

OPTIMIZER = (
    "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, "
    "weight_decay=1e-4)\n"
)
SCHEDULER = (
    "    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)\n"
)

CASES = [
    Planted(
        "learning-rate-not-scaled",
        "constant",
        "cnn_ddp",
        (
            (
                OPTIMIZER,
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # <mistake>\n",
            ),
        ),
        arguments=("--epochs", "4"),
    ),
    Planted(
        "learning-rate-scaled-twice",
        "global-batch-and-ranks",
        "cnn_ddp",
        (
            (
                OPTIMIZER,
                """    global_batch = args.batch_size * world_size
    lr = args.lr * world_size * global_batch / 64  # <mistake>
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "learning-rates-differ",
        "stepped-on-rank-0",
        "cnn_ddp",
        (
            ("        scheduler.step()\n", ""),
            (
                "            accuracy = evaluate(net, val_loader)\n",
                "            scheduler.step()  # <mistake>\n"
                "            accuracy = evaluate(net, val_loader)\n",
            ),
            (
                "            optimizer.step()\n",
                "            optimizer.step()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "schedule-counts-other-steps",
        "epochs-as-steps",
        "cnn_ddp",
        (
            (SCHEDULER, SCHEDULER.rstrip() + "  # <mistake>\n"),
            ("        scheduler.step()\n", ""),
            (
                "            optimizer.step()\n",
                "            optimizer.step()\n            scheduler.step()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "schedule-counts-other-steps",
        "length-before-split",
        "mlp_fsdp",
        (
            (
                "    total_steps = args.epochs * len(loader)\n",
                "    total_steps = args.epochs * len(train) // args.batch  # <mistake>\n",
            ),
            (
                "        optimizer, lambda step: 0.5",
                "        optimizer,  # <mistake>\n        lambda step: 0.5",
            ),
            ("            schedule.step()\n", "            schedule.step()  # <mistake>\n"),
        ),
    ),
    Planted(
        "checkpoint-incomplete",
        "model-only",
        "regress_resume",
        (
            (
                """    state = {
        "epoch": epoch,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, path + ".tmp")
""",
                """    state = {"epoch": epoch, "model": model.module.state_dict()}  # <mistake>
    torch.save(state, path + ".tmp")  # <mistake>
""",
            ),
            (
                """    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
""",
                """    state = torch.load(path, map_location="cpu")  # <mistake>
    model.module.load_state_dict(state["model"])  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "checkpoint-written-by-all",
        "every-epoch",
        "regress_resume",
        (
            (
                """    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)
""",
                """    torch.save(state, path)  # <mistake>
""",
            ),
            (
                """        if rank == 0:
            save_checkpoint(args.checkpoint, epoch, model, optimizer, scheduler)
            lr =""",
                """        save_checkpoint(args.checkpoint, epoch, model, optimizer, scheduler)  # <mistake>
        if rank == 0:
            lr =""",
            ),
        ),
    ),
    Planted(
        "resume-differs",
        "optimizer-made-after",
        "regress_resume",
        (
            (
                """            print(f"resumed at epoch {start_epoch}")
""",
                """            print(f"resumed at epoch {start_epoch}")
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)  # <mistake>
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # <mistake>
""",
            ),
            (
                "        start_epoch = load_checkpoint(args.checkpoint, model, optimizer, scheduler)\n",
                "        start_epoch = load_checkpoint(args.checkpoint, model, optimizer, scheduler)"
                "  # <mistake>\n",
            ),
            (
                """    optimizer.load_state_dict(state["optimizer"])
    scheduler""",
                """    optimizer.load_state_dict(state["optimizer"])  # <mistake>
    scheduler""",
            ),
        ),
    ),
    Planted(
        "resume-repeats-samples",
        "epoch-zero",
        "regress_resume",
        (
            (
                """        start_epoch = load_checkpoint(args.checkpoint, model, optimizer, scheduler)
        if rank == 0:
            print(f"resumed at epoch {start_epoch}")
""",
                """        load_checkpoint(args.checkpoint, model, optimizer, scheduler)  # <mistake>
        if rank == 0:
            print(f"resumed from {args.checkpoint}")
""",
            ),
            (
                "    for epoch in range(start_epoch, args.epochs):\n",
                "    for epoch in range(start_epoch, args.epochs):  # <mistake>\n",
            ),
            (
                "        for params, target in train_loader:\n",
                "        for params, target in train_loader:  # <mistake>\n",
            ),
        ),
    ),
]
