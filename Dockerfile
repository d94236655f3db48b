# One image for every process of Roundhouse; which one a container is, its command says.
FROM python:3.11-slim

# The walls around tenants' code.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 roundhouse \
    && install --directory --owner roundhouse --mode 0700 /var/lib/roundhouse

WORKDIR /srv/roundhouse
COPY pyproject.toml constraints.txt README.md ./
COPY app app
COPY workers workers
COPY migrations migrations
RUN pip install --no-cache-dir --constraint constraints.txt --editable .

USER roundhouse
ENV PYTHONUNBUFFERED=1 ROUNDHOUSE_HOME=/var/lib/roundhouse
