"""Train an autoencoder of noisy sine waves with a LightningModule and a checkpoint callback."""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Waves(L.LightningDataModule):
    def __init__(self, count=1024, batch_size=64):
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        phase = torch.rand(self.count, 1, generator=generator) * 2 * torch.pi
        waves = torch.sin(torch.linspace(0, 6, 64) + phase)
        noisy = waves + 0.1 * torch.randn(waves.shape, generator=generator)
        self.train, self.held_out = random_split(
            TensorDataset(noisy, waves), [0.9, 0.1], generator=generator
        )

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, self.batch_size)


class Autoencoder(L.LightningModule):
    def __init__(self, width=8, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, width))
        self.decoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 64))

    def _loss(self, batch):
        noisy, waves = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(noisy)), waves)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    L.seed_everything(0, workers=True)
    checkpoints = ModelCheckpoint(dirpath="checkpoints", save_last=True, monitor="val_loss")
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        deterministic=True,
        callbacks=[checkpoints],
        logger=CSVLogger("logs"),
        enable_progress_bar=False,
        log_every_n_steps=5,
    )
    last = "checkpoints/last.ckpt"
    trainer.fit(Autoencoder(), Waves(), ckpt_path=last if os.path.exists(last) else None)
    print(f"best validation loss {checkpoints.best_model_score:.4f} after {trainer.global_step}")


if __name__ == "__main__":
    main()
