import type { Lock, LockService as Service, Signal } from 'holdfast'

declare global {
  const LockService: typeof Service
  const locks: Service
  const lock: Lock
  const channel: { send(text: string): void }
  function sendReport(): Promise<void>
  function runNextTask(by: { readonly signal: Signal; readonly fencingToken: bigint }): Promise<void>
  function runScheduler(signal: Signal): Promise<void>
  function createReport(): Promise<void>
  function sendInvoice(): Promise<void>
  function charge(
    order: string,
    by: { readonly signal: Signal; readonly fencingToken: bigint; readonly idempotencyKey?: string },
  ): Promise<string>
}
