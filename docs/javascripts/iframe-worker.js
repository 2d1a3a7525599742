// Search in pages that are opened from disk: browsers refuse a file:// script as a web worker, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  const head = `<script>
    const toPage = data => parent.postMessage({ fromWorker: data }, "*")
    window.postMessage = toPage
    window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
      const script = document.createElement("script")
      Object.assign(script, { src: url, onload: done, onerror: failed })
      document.head.append(script)
    })), Promise.resolve())
  <\/script>`

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<!doctype html><html><head>${head}<script src="${new URL(url, location.href)}"><\/script></head></html>`
      this.loaded = new Promise(done => frame.addEventListener("load", () => done(frame.contentWindow)))
      addEventListener("message", event => {
        if (event.source === frame.contentWindow && "fromWorker" in event.data)
          this.dispatchEvent(new MessageEvent("message", { data: event.data.fromWorker }))
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.loaded.then(frame => frame.dispatchEvent(new frame.MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
