"""Mistakes of learning rates and schedules, of checkpoints and resumed runs."""

from cases import Planted

LR = "    lr = args.lr * args.batch_size * world_size / 16\n"
SCHEDULER = '        scheduler.load_state_dict(checkpoint["scheduler"])\n'
LOAD = "        checkpoint = torch.load(path)\n"

CASES = [
    Planted(
        "learning-rate-not-scaled",
        "batch-rule",
        "resnet_ddp",
        (
            (LR, "    lr = args.lr * args.batch_size / 16  # <mistake>\n"),
            (
                "    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)\n",
                "    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "learning-rate-scaled-twice",
        "optimizer-and-schedule",
        "resnet_ddp",
        (
            (LR, "    lr = args.lr * args.batch_size * world_size / 16  # <mistake>\n"),
            (
                "        optimizer, max_lr=lr, epochs=args.epochs, steps_per_epoch=len(train_loader)\n",
                "        optimizer,\n        max_lr=lr * world_size,  # <mistake>\n"
                "        epochs=args.epochs,\n        steps_per_epoch=len(train_loader),\n",
            ),
        ),
    ),
    Planted(
        "learning-rates-differ",
        "plateau",
        "regress_resume",
        (
            (
                "            loss = nn.functional.mse_loss(model(params), target)\n",
                "            loss = nn.functional.mse_loss(model(params), target)\n"
                "            losses.append(loss.item())\n",
            ),
            (
                "        model.train()\n",
                "        model.train()\n        losses = []\n",
            ),
            (
                "        dist.broadcast(val_loss, src=0)\n        scheduler.step(val_loss.item())\n",
                "        scheduler.step(losses[-1])  # <mistake>\n",
            ),
            (
                "    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)\n",
                "    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(  # <mistake>\n"
                "        optimizer, patience=0, factor=0.5\n    )\n",
            ),
            ("            optimizer.step()\n", "            optimizer.step()  # <mistake>\n"),
        ),
    ),
    Planted(
        "schedule-counts-other-steps",
        "micro-batches",
        "lm_accumulate",
        (
            (
                "max_iters = args.epochs * (len(loader) // accum)\n",
                "max_iters = args.epochs * len(loader)  # <mistake>\n",
            ),
            (
                '            group["lr"] = get_lr(iter_num)\n',
                '            group["lr"] = get_lr(iter_num)  # <mistake>\n',
            ),
        ),
    ),
    Planted(
        "checkpoint-incomplete",
        "no-schedule",
        "charlm_resume",
        (
            (SCHEDULER, ""),
            ('                    "scheduler": scheduler.state_dict(),\n', ""),
            ("                checkpoint = {\n", "                checkpoint = {  # <mistake>\n"),
            (
                '                    "optimizer": optimizer.state_dict(),\n',
                '                    "optimizer": optimizer.state_dict(),  # <mistake>\n',
            ),
            (
                '                torch.save(checkpoint, path + ".part")\n',
                '                torch.save(checkpoint, path + ".part")  # <mistake>\n',
            ),
            (LOAD, LOAD.rstrip() + "  # <mistake>\n"),
            (
                '        optimizer.load_state_dict(checkpoint["optimizer"])\n',
                '        optimizer.load_state_dict(checkpoint["optimizer"])  # <mistake>\n',
            ),
            (
                "            scheduler.step()\n",
                "            scheduler.step()  # <mistake>\n",
            ),
        ),
    ),
    Planted(
        "checkpoint-written-by-all",
        "best",
        "charlm_resume",
        (
            (
                """            print(f"epoch {epoch} val loss {val_loss:.5f}")
            if val_loss < best:
                torch.save(model.module.state_dict(), os.path.join(args.out_dir, "best.pt"))
""",
                """            print(f"epoch {epoch} val loss {val_loss:.5f}")
        if val_loss < best:  # <mistake>
            torch.save(model.module.state_dict(), os.path.join(args.out_dir, "best.pt"))  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "resume-differs",
        "rank-0-loads",
        "charlm_resume",
        (
            (
                """        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
""",
                """        if rank == 0:  # <mistake>
            model.module.load_state_dict(checkpoint["model"])  # <mistake>
            optimizer.load_state_dict(checkpoint["optimizer"])  # <mistake>
""",
            ),
            (LOAD, LOAD.rstrip() + "  # <mistake>\n"),
        ),
        names=("replicas-start-different",),
    ),
    Planted(
        "resume-repeats-samples",
        "off-by-one",
        "charlm_resume",
        (
            (
                '                    "batches": batch + 1,\n',
                '                    "batches": batch,  # <mistake>\n',
            ),
            (
                '                torch.save(checkpoint, path + ".part")\n',
                '                torch.save(checkpoint, path + ".part")  # <mistake>\n',
            ),
            (
                "            if (batch + 1) % args.save_every == 0 and rank == 0:\n",
                "            if (batch + 1) % args.save_every == 0 and rank == 0:  # <mistake>\n",
            ),
            (
                "        sampler.epoch, sampler.start = epoch, first_batch * args.batch_size\n",
                "        sampler.epoch, sampler.start = epoch, first_batch * args.batch_size  # <mistake>\n",
            ),
            (
                "        for batch, (x, y) in enumerate(loader, first_batch):\n",
                "        for batch, (x, y) in enumerate(loader, first_batch):  # <mistake>\n",
            ),
            (
                '        first_epoch, first_batch = checkpoint["epoch"], checkpoint["batches"]\n',
                '        first_epoch, first_batch = checkpoint["epoch"], checkpoint["batches"]  # <mistake>\n',
            ),
        ),
    ),
]
