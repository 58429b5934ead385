"""Chromium over the WebDriver protocol, with the standard library alone."""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--no-default-browser-check", "--hide-scrollbars",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def installed():
    """Paths of Chromium and its driver, installed from Debian where they are missing."""
    def find():
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        return browser, shutil.which("chromedriver")

    if not all(find()):
        subprocess.run(["apt-get", "install", "-y", "-qq", "chromium", "chromium-driver"], check=True)
    browser, driver = find()
    if not (browser and driver):
        raise SystemExit("error: chromium and chromedriver are needed (Debian: apt-get install chromium chromium-driver)")
    return browser, driver


class Browser:
    """A browser with one window and a profile of its own."""

    def __init__(self):
        browser, driver = installed()
        self.profile = tempfile.TemporaryDirectory(prefix="firebrick-browser-", ignore_cleanup_errors=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.session = ""
        for _ in range(200):
            try:
                if self.call("GET", "/status")["ready"]:
                    break
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.05)
        options = {"binary": browser, "args": ARGUMENTS + [f"--user-data-dir={self.profile.name}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def call(self, method, path, body=None):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def command(self, name, body=None):
        return self.call("POST", f"{self.session}/{name}", body or {})

    def devtools(self, command, **parameters):
        return self.command("goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, url):
        self.command("url", {"url": url})

    def script(self, text, *arguments):
        return self.command("execute/sync", {"script": text, "args": list(arguments)})

    def click(self, selector):
        found = self.command("element", {"using": "css selector", "value": selector})
        self.command(f"element/{found[ELEMENT]}/click")

    def keys(self, text):
        """Presses keys, one after the other, wherever the focus is."""
        steps = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.command("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def size(self, width, height):
        """A window of this size, as a phone has it where it is narrow."""
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def theme(self, name):
        """What the system is said to prefer."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def errors(self):
        """What the console said since it was last asked, but for what is no problem."""
        return [entry["message"] for entry in self.command("se/log", {"type": "browser"}) if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path, most=2600):
        """The whole page as a picture, of a long page the beginning."""
        width, height = self.script("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
        data = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def screenshot_window(self, path):
        """What the window shows, a cursor and its words included."""
        path.write_bytes(base64.b64decode(self.command_get("screenshot")))

    def command_get(self, name):
        return self.call("GET", f"{self.session}/{name}")

    def printed(self):
        """The page as a PDF."""
        return base64.b64decode(self.command("print", {"background": True}))

    def close(self):
        try:
            self.call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(10)
            self.profile.cleanup()
