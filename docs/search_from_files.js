// Search on pages opened from files: browsers refuse them workers, so the worker's script runs in a
// hidden frame instead. Of a worker it has what the theme's search uses.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.worker = this;
      this.loaded = new Promise((resolve) => { this.frame.onload = resolve; });
      const answer = "self.postMessage = (data) => self.frameElement.worker.onmessage?.({ data })";
      this.frame.srcdoc = `<script>${answer}</script><script src="${url}"></script>`;
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
