# One image for every process of Roundhouse; which one a container is, its command says.
FROM python:3.11-slim

# A new named volume takes over the owner and mode of the folder that it covers here.
RUN useradd --create-home --uid 1000 roundhouse \
    && install --directory --owner roundhouse --group roundhouse --mode 0700 \
        /var/lib/roundhouse /var/lib/roundhouse/admin /var/lib/roundhouse/island \
        /var/lib/roundhouse/run /var/lib/roundhouse/store \
        /run/roundhouse /run/roundhouse/public /run/roundhouse/secrets \
        /secrets /secrets/api /secrets/control /secrets/device /secrets/hosts \
        /secrets/hosts/local /secrets/island /secrets/island-key /secrets/public /secrets/redis

WORKDIR /srv/roundhouse
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY workers workers
COPY migrations migrations
COPY docs docs
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".[search]" \
    && python -m compileall -q app workers migrations  # the processes may not write beside them
# CRIU=1: with the program that stores processes of commands, for device workers that are root
ARG CRIU=
RUN test -z "$CRIU" || { apt-get update && python -m app.local.criu_prefix .criu; }

USER roundhouse
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp ROUNDHOUSE_HOME=/var/lib/roundhouse
