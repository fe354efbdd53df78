"""Visits every page of the built site in Chromium and reports what is broken.

    mkdocs build --strict --site-dir /tmp/site
    python .ci/browse.py /tmp/site --pictures /tmp/pictures

It serves the site on this machine and visits each page at 390 and 1280 pixels. It reports broken
links and pictures, errors of scripts, requests to other hosts, and pages that are wider than the
window, checks that the search finds a name, and takes pictures. It needs Chromium, its driver and
`pip install selenium`. It is run by hand.
"""

import argparse
import base64
import functools
import http.server
import json
import pathlib
import shutil
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

WIDTHS = (390, 1280)
PICTURED = (
    "index.html", "concepts/codec/", "guides/compress/", "api/optimizers/", "results/quality/",
)  # fmt: skip
DARK = ("index.html", "concepts/subspace/", "notebooks/where_errors_go/")
TALLEST = 3600
SEARCHED = "compress_residuals"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
    " --disable-background-networking --disable-component-update --disable-sync"
)
LOOK = """
const gone = [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src);
const links = [...document.querySelectorAll('a[href]')].map(a => a.href);
const root = document.documentElement;
const wide = [...document.querySelectorAll('.md-content *')]
  .filter(e => e.getBoundingClientRect().right > root.clientWidth + 1)
  .filter(e => {
    for (let p = e.parentElement; p; p = p.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
    return true;
  })
  .slice(0, 3).map(e => e.tagName + '.' + e.className);
const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
return {gone, links, wide, ids, width: Math.max(root.scrollWidth, document.body.scrollWidth)};
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Drops the message."""


def serve(folder: pathlib.Path) -> str:
    """Serves a folder from a thread and returns its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def start(profile: str, scheme: str) -> webdriver.Chrome:
    """Starts Chromium, which prefers a color scheme and records requests and messages."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(60)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    return driver


def resize(driver: webdriver.Chrome, width: int) -> None:
    """Makes the window as wide as a device."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def picture(driver: webdriver.Chrome, file: pathlib.Path, width: int) -> None:
    """Writes a picture of the page that is open, from its top to `TALLEST` pixels."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST), "scale": 1}
    settings = {"clip": clip, "captureBeyondViewport": True}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", settings)
    file.write_bytes(base64.b64decode(shot["data"]))


def requested(driver: webdriver.Chrome) -> list[str]:
    """Returns the addresses that were requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = (m for m in messages if m["method"] == "Network.requestWillBeSent")
    return [m["params"]["request"]["url"] for m in sent]


def finds(driver: webdriver.Chrome, address: str, word: str) -> bool:
    """Returns whether the search of the site finds a word."""
    driver.get(f"{address}?q={word}")
    for _ in range(60):
        time.sleep(0.5)
        results = driver.find_elements(By.CSS_SELECTOR, ".md-search-result__item")
        if any(word in (result.get_attribute("textContent") or "") for result in results):
            return True
    return False


def broken_links(pages: dict[str, dict[str, Any]], address: str) -> list[str]:
    """Returns links of pages that lead to no file of the site, or to no place in a page."""
    broken, answers = [], {}
    for page, seen in pages.items():
        for link in sorted({link for link in seen["links"] if link.startswith(address)}):
            target, _, anchor = link.partition("#")
            name = target.removeprefix(address).partition("?")[0] or "index.html"
            if name not in answers:
                try:
                    with urllib.request.urlopen(target) as answer:
                        answers[name] = bool(answer.read())
                except OSError:
                    answers[name] = False
            anchor = urllib.parse.unquote(anchor)
            known = pages.get(name, {}).get("ids")
            if not answers[name] or (anchor and known is not None and anchor not in known):
                broken.append(f"{page}: {link.removeprefix(address)}")
    return broken


def main() -> None:
    """Visits, reports and takes pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--pictures", type=pathlib.Path)
    given = parser.parse_args()
    found = sorted(given.site.rglob("index.html"))
    names = [str(path.parent.relative_to(given.site)) + "/" for path in found]
    names = ["index.html" if name == "./" else name for name in names]
    address = serve(given.site)
    problems: dict[str, list[str]] = {
        kind: [] for kind in ("links", "pictures", "scripts", "other hosts", "too wide")
    }
    pages: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as profile:
        driver = start(profile, "light")
        for width in WIDTHS:
            resize(driver, width)
            for name in names:
                driver.get(address + name)
                seen = driver.execute_script(LOOK)
                where = f"{name} at {width}"
                pages[name] = seen
                problems["pictures"] += [f"{where}: {source}" for source in seen["gone"]]
                if seen["width"] > width or seen["wide"]:
                    problems["too wide"].append(f"{where}: {seen['width']} {seen['wide']}")
                problems["scripts"] += [
                    f"{where}: {entry['message']}"
                    for entry in driver.get_log("browser")
                    if entry["level"] == "SEVERE"
                ]
                problems["other hosts"] += [
                    f"{where}: {url}"
                    for url in requested(driver)
                    if not url.startswith((address, "data:", "blob:", "chrome:"))
                ]
                if given.pictures and name in PICTURED:
                    given.pictures.mkdir(parents=True, exist_ok=True)
                    file = name.strip("/").replace("/", "-").removesuffix(".html")
                    picture(driver, given.pictures / f"{file}-{width}.png", width)
        is_found = finds(driver, address, SEARCHED)
        driver.quit()
    if given.pictures:
        with tempfile.TemporaryDirectory() as profile:
            driver = start(profile, "dark")
            resize(driver, WIDTHS[-1])
            for name in DARK:
                driver.get(address + name)
                file = name.strip("/").replace("/", "-").removesuffix(".html")
                picture(driver, given.pictures / f"{file}-dark.png", WIDTHS[-1])
            driver.quit()
    problems["links"] = broken_links(pages, address)
    links = sum(len(seen["links"]) for seen in pages.values())
    print(f"{len(names)} pages at {WIDTHS} pixels, {links:,} links")
    print(f"search finds `{SEARCHED}`: {is_found}")
    for kind, cases in problems.items():
        print(f"{kind}: {len(cases)}")
        for case in cases[:40]:
            print(f"  {case}")
    sys.exit(bool(any(problems.values()) or not is_found))


if __name__ == "__main__":
    main()
