# The project in an image: `make demo`, `make test` and `specdec` (docs/install.md). BASE: an image of Ubuntu 24.04.
ARG BASE=ubuntu:24.04
FROM ${BASE}

# versions are those of the base image's release
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 app \
    && install --directory --owner app --group app /home/app/src /home/app/.cache /home/app/.cache/specdec
USER 10001
WORKDIR /home/app/src
ENV PATH=/home/app/src/.venv/bin:$PATH

# the environment, in a layer of its own: only these files change it
COPY --chown=app pyproject.toml setup.py constraints.txt Makefile LICENSE ./
ARG PIP_EXTRA_INDEX_URL=
RUN --mount=type=cache,target=/tmp/pip,uid=10001 touch README.md && PIP_CACHE_DIR=/tmp/pip make .venv/.done

COPY --chown=app . .
# newer than the files just copied, or make would install again
RUN touch .venv/.done
CMD ["specdec", "--help"]
