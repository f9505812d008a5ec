#!/usr/bin/env bash
# Makes or updates a virtual environment: setup.sh FOLDER PYTHON EXTRAS. Returns at once when nothing changed.
set -euo pipefail
folder="$1" python="$2" extras="$3"
stamp="$folder/.stamp-setup"

version="$("$python" -c 'import sys; print("%d%02d" % sys.version_info[:2])')"
if [ "$version" -lt 311 ]; then
  echo "setup: $python is Python $version, expected 3.11 or newer; choose another with make PYTHON=..." >&2
  exit 1
fi
case "$version" in 311) constraints=constraints/py311.txt ;; *) constraints=constraints/py312.txt ;; esac

# The stamp holds what was installed from; a change of any of it installs again.
wanted="$(cat pyproject.toml "$constraints" tools/setup.sh | cksum) $version $extras $PWD"
if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  echo "setup: $folder is up to date"
  exit 0
fi
if [ ! -x "$folder/bin/python" ]; then
  "$python" -m venv "$folder" || {
    echo "setup: $python cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2
    exit 1
  }
fi
rm -f "$stamp"
echo "setup: installing into $folder ($constraints)"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".[$extras]"
echo "$wanted" >"$stamp"
