-- Releases the share of an owner, or the permits that are reserved for it, removes its position in the queue, and hands off to the
-- waiters that fit. Placed before the scripts that do so, in the place of release/release_one.lua, which describes the arguments and the
-- answer. Without a queue, whose slot moves, nothing is handed off.

local function release_one(key, queue, companion, _, owner, me, to, fences_last, keep)
  read(key, owner, owner .. '-next')
  local held = members[owner]
  local own = held or members[owner .. '-next']
  if own then
    redis.call('ZREM', key, own)
  end
  if held and keep then
    -- No claim has such a token.
    local member = string.gsub(held, owner, owner .. '-kept', 1)
    write(member, tonumber(keep))
    count(member)
  end
  local passed = false
  if queue and redis.call('EXISTS', queue) == 1 then
    if me ~= '' then
      redis.call('ZREM', queue, me)
      mark_alive(queue, me)
    end
    -- The share that is kept may end earlier than the waiters expect.
    passed = pass(key, queue, companion, to, nil, nil, held and keep)
  end
  if used == 0 and companion and fences_last ~= '0' then
    redis.call('PEXPIRE', companion, fences_last)
  end
  return held, passed == nil
end

