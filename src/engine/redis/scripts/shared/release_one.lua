-- Releases the share of an owner, or the permits that are reserved for it, removes its position in the queue, and hands off to the
-- waiters that fit. Placed before the scripts that do so, in the place of release/release_one.lua, which describes the arguments and the
-- answer. Without a queue, whose slot moves, nothing is handed off.

local function release_one(key, queue, companion, _, owner, me, to, fences_last, keep)
  local own, is_held = read(key, owner)
  local is_kept = is_held and keep
  if is_kept then
    -- No claim has such a token.
    write((string.gsub(own, owner, owner .. '-kept', 1)), tonumber(keep))
    add(string.match(own, '^(%d+)/(%d+)'))
  end
  local passed = false
  if queue and redis.call('EXISTS', queue) == 1 then
    if me ~= '' then
      redis.call('ZREM', queue, me)
      mark_alive(queue, me)
    end
    -- The share that is kept may end earlier than the waiters expect.
    passed = pass(key, queue, companion, to, nil, nil, is_kept)
  end
  -- After the hand-off has written, because it may be the last member (see `read`).
  if own then
    redis.call('ZREM', key, own)
  end
  if used == 0 and companion and fences_last ~= '0' then
    redis.call('PEXPIRE', companion, fences_last)
  end
  return is_held, passed == nil
end

