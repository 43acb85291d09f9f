import type { Signal } from 'holdfast'

declare global {
  function charge(order: string, by: { readonly signal: Signal; readonly fencingToken: bigint }): Promise<string>
}
