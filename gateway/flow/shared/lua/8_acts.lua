-- Acts of a request: arrives, moves, leaves, runs, emits, ends.

local function own_ticket(id)
  local ticket = tickets.get(id)
  return ticket and ticket.gateway == own and ticket
end

local function forget_ticket(id, ticket)
  tickets.drop(id)
  redis.call('ZREM', K.owned, ticket.gateway .. SEPARATOR .. id)
  if ticket.runs then
    redis.call('ZREM', K.outbox, ticket.gateway .. SEPARATOR .. id)
  end
end

local function charge_running(ticket, cost)
  charge(ticket.tenant, ticket.weight, cost, ticket.gateway)
  if ticket.reserved then
    reservation_corrected(ticket.tenant, cost)
  end
end

-- Ends what runs; its charge becomes `cost` (nil: stays as it is).
local function stop(id, ticket, cost)
  if cost and cost ~= ticket.charged then
    charge_running(ticket, cost - ticket.charged)
  end
  if ticket.reserved then
    reservation_ended(ticket.tenant)
  end
  local tenant = tenants.need(ticket.tenant)
  end_ahead(tenant, ticket.gateway, scaled(cost or ticket.charged, ticket.weight))
  tenant.under_way = math.max(0, tenant.under_way - 1)
  tenant.ended = tenant.under_way == 0 and number_of('served')
  tenants.put(ticket.tenant, tenant)
  add_load(ticket, -ticket.live, -ticket.kv_now)
  forget_ticket(id, ticket)
end

local function leave(id, ticket)
  step_out(id, ticket)
  count_asked(ticket.tenant, ticket.tier, -1)
  forget_ticket(id, ticket)
end

-- As codec.Refusal, where the queue is full.
local function refusal(id, tenant)
  local waiting = 0
  for place = 1, PLACES do
    waiting = waiting + number_of('queued' .. place)
  end
  local retry_after_s = math.min(60, math.max(1, tonumber(meta.interval_s or '1')))
  if num_waiting(tenant) >= rule.max_queued_per_tenant then
    return {id, true, rule.max_queued_per_tenant, retry_after_s}
  elseif waiting >= rule.max_queued then
    return {id, false, rule.max_queued, retry_after_s}
  end
end

local refused = {}
local acts = {}

local function new_ticket(about)
  return {
    gateway = own, life = gateways.get(own).life, number = add_to('seq', 1),
    arrived_us = now_us - about.waited_us, tenant = about.tenant, tier = about.tier, cost = about.cost,
    weight = about.weight, sequences = about.sequences, kv = about.kv, predicted = about.predicted,
    cached = about.cached, unfit = next(about.unfit) and about.unfit or nil,
  }
end

-- Queues a request. `about.front`: it ran before and was put back to the head of its tenant's line; `joined`: when it
-- had joined that, if known.
function acts.arrive(id, about, joined)
  if tickets.get(id) then
    return
  end
  local tenant = tenants.get(about.tenant)
  local back_since = about.front and (joined or number_of('served'))
  local is_taken = back_since or gateways.get(own).is_joining
  if not is_taken and refusal(id, tenant) then
    give_turns()
  end
  local full = not is_taken and refusal(id, tenant)
  if full then
    refused[#refused + 1] = full
    return
  end
  local ticket = new_ticket(about)
  tenant.weight = about.weight
  reserve(tenant, about)
  ticket.place = place_of(effective_tier(ticket), about.lane)
  ticket.front = back_since and add_to('fronts', 1)
  stand(id, ticket, head(ticket.place), false, back_since)
  count_asked(about.tenant, ticket.tier, 1)
  redis.call('ZADD', K.owned, 0, own .. SEPARATOR .. id)
end

-- Adds a running request of a gateway that joins (again), with its present charge.
function acts.run(id, about)
  if tickets.get(id) then
    return
  end
  local ticket = new_ticket(about)
  for name, value in pairs(about.running) do
    ticket[name] = value
  end
  ticket.runs = true
  local tenant = tenants.get(about.tenant)
  begin_ahead(tenant, own)
  charge_ahead(tenant, own, scaled(ticket.charged, ticket.weight))
  tenant.under_way = tenant.under_way + 1
  if ticket.reserved then
    reserve(tenant, about)
    ticket.reserved = tenant.reserved and true or false
    if ticket.reserved then
      tenant.reserved.running = tenant.reserved.running + 1
    end
  end
  tenants.put(about.tenant, tenant)
  tickets.put(id, ticket)
  redis.call('ZADD', K.owned, 0, own .. SEPARATOR .. id)
  add_load(ticket, ticket.live, ticket.kv_now)
end

-- Another tier, as asked for; the arrival stays.
function acts.move(id, tier, lane)
  local ticket = own_ticket(id)
  if not ticket or ticket.runs then
    return
  end
  reservation_comes(tenants.get(ticket.tenant))
  count_asked(ticket.tenant, ticket.tier, -1)
  count_asked(ticket.tenant, tier, 1)
  ticket.tier = tier
  local place = place_of(effective_tier(ticket), lane)
  if place ~= ticket.place then
    step_out(id, ticket)
    ticket.place = place
    stand(id, ticket, head(place))
  else
    watch_ageing(id, ticket)
    tickets.put(id, ticket)
  end
end

-- Other replicas cannot do what it needs.
function acts.unfit(id, replicas)
  local ticket = own_ticket(id)
  if ticket then
    ticket.unfit = next(replicas) and replicas or nil
    tickets.put(id, ticket)
  end
end

-- Its client waits no more. If its turn came meanwhile, nothing of it runs.
function acts.cancel(id)
  local ticket = own_ticket(id)
  if ticket and ticket.runs then
    stop(id, ticket, 0)
  elseif ticket then
    leave(id, ticket)
  end
end

-- Charges a running request what is expected of it by now, and counts it at its replica: InFlightRequests._recount.
local function recount(id, ticket, live)
  local expected = math.max(ticket.foreseen or ticket.predicted, ticket.output or 0)
  local more = expected - ticket.predicted
  local cost = ticket.cost + more * rule.output_cost
  if cost ~= ticket.charged then
    charge_running(ticket, cost - ticket.charged)
    ticket.charged = cost
  end
  local kv = math.floor(math.max(expected, ticket.kv + more) * live / ticket.sequences)
  add_load(ticket, live - ticket.live, kv - ticket.kv_now)
  ticket.live, ticket.kv_now = live, kv
  tickets.put(id, ticket)
end

-- Output so far, and how many sequences still run; what passes the prediction is charged.
function acts.progress(id, output, live)
  local ticket = own_ticket(id)
  if ticket and ticket.runs then
    ticket.output = output
    recount(id, ticket, live)
  end
end

-- Its engine foresees another length of the whole output, all sequences together.
function acts.foresee(id, tokens)
  local ticket = own_ticket(id)
  if ticket and ticket.runs then
    ticket.foreseen = tokens
    recount(id, ticket, ticket.live)
  end
end

-- It is over: its charge becomes what was really computed and emitted.
function acts.finish(id, cost)
  local ticket = own_ticket(id)
  if ticket and ticket.runs then
    stop(id, ticket, cost)
  end
end

-- It has to go on elsewhere: it is over here at the cost of what it had, and the rest waits.
function acts.put_back(id, cost, about)
  local ticket = own_ticket(id)
  if ticket and ticket.runs then
    stop(id, ticket, cost)
    acts.arrive(id, about, ticket.joined)
  end
end

-- The lives in which this gateway knows the replicas of its list.
function acts.lives(lives)
  gateways.get(own).lives = lives
end

-- A replica, or a life of it, is out or is back. Every gateway has long seen what is older than the last epochs.
local MOST_EPOCHS = 256
function acts.member(replica_id, goes_out, life)
  local epoch = members.epoch + 1
  local said = goes_out and {epoch, own, gateways.get(own).life} or nil
  members.epoch, members.out[life and life_of(replica_id, life) or replica_id] = epoch, said
  for each, word in pairs(members.out) do
    if word[1] <= epoch - MOST_EPOCHS then
      members.out[each] = nil
    end
  end
  set_meta('members', cmsgpack.pack(members))
end

-- A tenant had service by this gateway's requests; `serials`: by replica, its engine's life and the last serial
-- numbers of the tenant's service there. They rise while an engine lives; gateways hear of them at their own pace.
function acts.had(tenant_id, amount, serials)
  local tenant = tenants.get(tenant_id)
  local part = tenant.ahead and tenant.ahead[own]
  if part then
    part[AHEAD] = part[AHEAD] - amount
  end
  tenant.heard = tenant.heard or {}
  for replica_id, said in pairs(serials) do
    local known = tenant.heard[replica_id]
    if known and known[1] == said[1] then
      for i = 2, #said do
        said[i] = math.max(said[i], known[i])
      end
    end
    tenant.heard[replica_id] = said
  end
  tenants.put(tenant_id, tenant)
end

-- An engine lifted a tenant in a tier: RequestQueue.raise_by (gateway/flow/queue.py).
function acts.lift(tenant_id, tier, amount)
  local tenant = tenants.get(tenant_id)
  for lane = 0, 1 do
    local place = place_of(tier, lane)
    if tenant.count[place] == 0 then
      local to, first = counter_in(tenant, place) + amount, head(place)
      raise_to(tenant, place, first and math.min(to, counter_of(first, place)) or to)
    end
  end
  tenants.put(tenant_id, tenant)
end

-- Other brakes (FlowController.set_brakes): what of a braked tier has moved up and waits goes back, by arrival; what
-- of a tier that is free again waits ages from now on.
function acts.brakes(shares)
  local turned, any = {}, false
  for i = 1, TIERS do
    turned[i] = (brakes[i] < 1) ~= (shares[i] < 1)
    any = any or turned[i]
  end
  brakes = shares
  set_meta('brakes', cmsgpack.pack(shares))
  local above = {}
  for _, id in ipairs(any and redis.call('HKEYS', K.tickets) or {}) do
    local ticket = tickets.need(id)
    if not ticket.runs and turned[ticket.tier + 1] then
      watch_ageing(id, ticket)
      if is_braked(ticket.tier) and band_of(ticket.place) < ticket.tier then
        above[#above + 1] = {ticket.tier, lane_of(ticket.place), ticket.arrived_us, ticket.number, id}
      end
    end
  end
  table.sort(above, is_less)
  for _, each in ipairs(above) do
    local id = each[5]
    local ticket = tickets.need(id)
    step_out(id, ticket)
    ticket.place = place_of(each[1], each[2])
    stand(id, ticket, head(ticket.place))
  end
end

function acts.order(name)
  if name ~= meta.order then
    set_order(name)
  end
end
