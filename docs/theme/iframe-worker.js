/* Pages that are opened as files: browsers start no Worker there, and the search of the site needs one. This one runs the
   script in a hidden frame of the page instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      const script = inside.document.createElement("script");
      script.src = url;
      this.#loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${url} cannot be loaded`));
      });
      // In a worker this sends to the page.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.document.head.append(script);
    }

    async postMessage(data) {
      await this.#loaded;
      const inside = this.#frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
