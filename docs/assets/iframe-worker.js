// Search when the site is opened from the file system, where browsers start no Worker:
// a hidden frame takes its place. The plugin `offline` asks for a script of this name.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.postMessage = (data) => {
        const heard = new MessageEvent("message", { data });
        this.dispatchEvent(heard);
        if (this.onmessage) this.onmessage(heard);
      };
      inner.importScripts = (...urls) =>
        urls.reduce((done, url) => done.then(() => this.load(url)), Promise.resolve());
      inner.document.write("<body></body>");
      inner.document.close();
      this.loaded = this.load(url);
    }
    load(url) {
      return new Promise((resolve) => {
        const script = this.frame.contentDocument.createElement("script");
        script.onload = resolve;
        script.src = url;
        this.frame.contentDocument.body.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      );
    }
    terminate() {
      this.frame.remove();
    }
  };
