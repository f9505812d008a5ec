#!/usr/bin/env bash
# Prints a Python of version $1 (for example 3.12) that really starts; prints nothing and exits 1 when there is none.
set -u
version="$1"

works() { [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null)" = "$version" ]; }

for candidate in "$(command -v "python$version" || true)" "$(command -v python3 || true)"; do
  if [ -n "$candidate" ] && works "$candidate"; then echo "$candidate"; exit 0; fi
done
if command -v pyenv >/dev/null 2>&1; then
  for candidate in "$(pyenv root)/versions/$version".*/bin/python3; do
    if [ -x "$candidate" ] && works "$candidate"; then echo "$candidate"; exit 0; fi
  done
fi
exit 1
